"""One thin Prefect task per stage: cache key, lock, retries, timeout, progress, UI artifact.

No numbers are computed here.
"""
