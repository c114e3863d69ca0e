"""The files of a report; the page in a real browser."""

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from evaluated_small import full_report, response, small_report, some_responses

from dflash.decoding.page import write_report
from dflash.decoding.responses import read_responses

CHROMIUM = shutil.which("chromium")
HISTORY = {"chain": [(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day), 2 + day / 10) for day in range(5)]}
HOSTILE = "</pre><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full report with a hostile text, a long name, many categories and all budgets."""
    folder = tmp_path_factory.mktemp("report")
    budgets = (8, 16, 32, 64, 128, 256, 512)
    names = ["maths", "writing", HOSTILE, "a_very_long_category_name_without_any_space_in_it_" * 3]
    responses = [response(f"p{n}", category=names[n % 4], budgets=budgets) for n in range(16)]
    report = full_report(responses)
    report["worst"][0] |= {"prompt": HOSTILE, "text": HOSTILE * 5, "missed": [HOSTILE]}
    report["notes"] = [HOSTILE]
    write_report(folder, report, responses, history=HISTORY)
    return folder


def test_all_files_are_written(folder: Path) -> None:
    names = ["acceptance_by_slot", "acceptance_length", "accepted", "history"]
    plots = [f"plots/{name}.{kind}" for name in names for kind in ("png", "svg")]
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == sorted(["report.json", "report.md", "report.html", "responses.parquet", *plots])
    report = json.loads((folder / "report.json").read_text())
    assert report["overall"]["responses"] == len(read_responses(folder)) == 16


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    responses = some_responses()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, full_report(responses), responses, history=HISTORY)
    for path in (tmp_path / "first").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "second" / path.relative_to(tmp_path / "first")).read_bytes(), path.name


def test_the_page_asks_nothing_of_the_network(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert not re.findall(r"url\((?!#)|@import", text)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_one_response_makes_a_report(tmp_path: Path, num_tokens: int) -> None:
    responses = [response("p", num_tokens=num_tokens)]
    write_report(tmp_path, small_report(responses), responses)
    assert "not measured" in (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_on_a_phone_and_a_desk_by_day_and_night(
    browser: Any, folder: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((folder / "report.html").as_uri())
    assert page.title() == "Acceptance of training-1"
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for text in ("Conditional acceptance by slot", "Expected speedup", "Worst cases", HOSTILE):
        assert page.get_by_text(text).first.is_visible(), text
    assert page.locator("figure svg").count() == 4
    for svg in page.locator("figure svg").all():
        box = svg.bounding_box()
        assert 300 <= box["width"] <= width
        assert 150 <= box["height"] <= box["width"]
    # letters and their ground differ enough, in the page and in the plots (WCAG 2.1, 1.4.3)
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    card = luminance(page.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor"))
    letters = luminance(page.evaluate("getComputedStyle(document.body).color"))
    labels = luminance(page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill"))
    assert contrast(letters, ground) > 7
    assert contrast(labels, card) > 7
    assert (ground < 0.05) == (scheme == "dark")
    # on a phone a letter in a plot is no smaller than 8 pixels
    heights = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) >= 8
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.close()


def luminance(colour: str) -> float:
    """Relative luminance of rgb(r, g, b), by WCAG 2.1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
