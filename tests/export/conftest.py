from collections.abc import Iterator

import pytest

from tests.export.export_small import Made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """In a data root of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("exported")))
        yield Made(tmp_path_factory.mktemp("prompts"))
