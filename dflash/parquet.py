"""Reading Parquet files that may be damaged."""

from pathlib import Path

import polars as pl


def read_parquet(path: Path, schema: pl.Schema) -> pl.DataFrame:
    """The rows of a file of this project. Raises ValueError, in one line without the path, where it is damaged or of
    other columns, and OSError where it cannot be read at present: it may be whole.
    """
    try:
        frame = pl.read_parquet(path)
    except OSError:
        raise
    # for some damage polars panics, which is no Exception
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"unreadable ({cause})") from None
    if frame.schema != schema:
        raise ValueError("of other columns: of another version, perhaps")
    return frame
