"""DFlash drafters for speculative decoding: from prompts to a measured acceptance length.

prompts ─generation─▶ Conversations ─tokenization─▶ Corpus ─extraction─▶ HiddenStates
          verifier                     polars                verifier      Zarr
                                              HiddenStates ─training─▶ Drafter ─evaluation─▶ Report
                                                             torch               replay, DDTree

Plain functions, no Prefect: config and artifacts in, one artifact out. `tasks/` and `flows/` orchestrate them.
"""
