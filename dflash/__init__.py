"""DFlash drafters for speculative decoding: from prompts to a measured acceptance length.

prompts ─generation─▶ Conversations ─tokenization─▶ Corpus ─extraction─▶ HiddenStates ─training─▶ Drafter ─evaluation─▶ Report
          verifier                     polars                verifier      Zarr          torch               replay, DDTree

Plain functions, no Prefect: config and artifacts in, one artifact out. `tasks/` and `flows/` orchestrate them.
"""
