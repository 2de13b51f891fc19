"""The web page in a real browser: typed words get Python's phones, and a page that cannot work says why."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.browser import CHROMIUM, Browser
from tests.examples.conftest import Example
from tests.examples.javascript import ROOT, needs_packages
from tests.skips import JAVASCRIPT, skip, skip_if

pytestmark = [
    pytest.mark.slow,
    needs_packages("web"),
    skip_if(CHROMIUM is None, "Chromium", JAVASCRIPT),
]

SUMMARY = "document.getElementById('summary').textContent"
PROBLEM = "document.getElementById('problem')?.textContent"
PHONES = "[...document.querySelectorAll('#phones .phone')].map((part) => part.textContent).join(' ')"


# All that the example's README says to ship.
PAGE = ("index.html", "style.css", "app.mjs", "generator.mjs")
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
SHIPPED = (*PAGE, *(f"node_modules/onnxruntime-web/dist/{name}" for name in RUNTIME))
BUNDLE = ("bundle.json", "tokenizer/tokenizer.json", "onnx/fp32/generate.onnx")

REQUESTS: list[str] = []


class Handler(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` serves; notes what it was asked for."""

    def log_message(self, *arguments: Any) -> None:
        """Note a request instead of printing it."""
        REQUESTS.append(str(arguments))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, g2p: Example) -> Iterator[tuple[Path, str]]:
    """The example's folder with the bundle in it, and its address."""
    folder = tmp_path_factory.mktemp("site")
    for name in SHIPPED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples/web" / name, folder / name)
    for name in BUNDLE:
        (folder / "tfm_bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(g2p.bundle / name, folder / "tfm_bundle" / name)
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def _browser_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An installed Chromium may still lack what it needs of the system, in containers above all."""
    try:
        with Browser(tmp_path_factory.mktemp("profile")) as browser:
            browser.call("Browser.getVersion")
    except (AssertionError, OSError) as problem:
        skip("a Chromium that starts", JAVASCRIPT, found=str(problem))


@pytest.fixture
def browser(tmp_path: Path, _browser_starts: None) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, site: tuple[Path, str]) -> Browser:
    """The page, once its model is loaded."""
    browser.open(f"{site[1]}/index.html")
    browser.wait_for(f"document.getElementById('word')?.disabled === false || {PROBLEM}")
    assert browser.evaluate(PROBLEM) == ""
    return browser


def tree(browser: Browser) -> list[dict[str, Any]]:
    """What the page is to those who do not see it: role, name and more of each part."""
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            **{p["name"]: p["value"].get("value") for p in node.get("properties", [])},
        }
        for node in nodes
        if not node["ignored"]
    ]


def test_words_get_pythons_phones(page: Browser, g2p: Example) -> None:
    first, *others = g2p.phones
    page.type(first)
    page.wait_for(f"{SUMMARY}.startsWith('{g2p.phones[first]} · ')")
    assert page.evaluate(PHONES) == g2p.phones[first]
    found = {}
    for word in others:
        page.evaluate("document.getElementById('word').select()")
        page.evaluate("document.getElementById('summary').textContent = ''")
        page.call("Input.insertText", text=word)
        page.wait_for(SUMMARY)
        found[word] = page.evaluate(PHONES)
    assert found == {word: g2p.phones[word] for word in others}
    assert page.messages == []


def test_the_page_tells_everything_to_those_who_do_not_see_it(page: Browser, g2p: Example) -> None:
    word, phones = next(iter(g2p.phones.items()))
    page.type(word)
    page.wait_for(f"{SUMMARY}.startsWith('{phones} · ')")
    parts = tree(page)
    (field,) = [part for part in parts if part["role"] == "textbox"]
    assert (field["name"], field["focused"], field["invalid"]) == ("Word", True, "false")
    (status,) = [part for part in parts if part["role"] == "status"]
    assert status["live"] == "polite"
    texts = [part["name"] for part in parts if part["role"] == "StaticText"]
    assert any(text.startswith(f"{phones} · probability 0.") for text in texts)
    assert [part["role"] for part in parts].count("listitem") == len(phones.split())

    page.type("7")
    page.wait_for(PROBLEM)
    parts = tree(page)
    assert [part["live"] for part in parts if part["role"] == "alert"] == ["assertive"]
    assert 'This word cannot be read: the model does not know "7".' in [part["name"] for part in parts]
    assert [part["invalid"] for part in parts if part["role"] == "textbox"] == ["true"]
    assert page.evaluate(PHONES) == ""
    page.evaluate("document.getElementById('word').select()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Backspace", code="Backspace", windowsVirtualKeyCode=8)
    page.wait_for(f"{PROBLEM} === ''")


def test_nothing_that_is_typed_leaves_the_page(page: Browser, g2p: Example) -> None:
    before = [*REQUESTS]
    page.type(next(iter(g2p.phones)))
    page.wait_for(SUMMARY)
    assert before == REQUESTS
    assert "generate.onnx" in str(before)
    # Nor could it go elsewhere, whatever the page's script did.
    assert page.evaluate("fetch('https://example.com/?word=x').then(() => 'sent', () => 'refused')") == "refused"
    assert "violates" in str(page.messages)
    assert "Content Security Policy" in str(page.messages)


def test_a_page_without_a_bundle_says_so(browser: Browser, site: tuple[Path, str]) -> None:
    folder, address = site
    (folder / "empty").mkdir()
    for name in (*PAGE, "node_modules"):
        (folder / "empty" / name).symlink_to(folder / name)
    browser.open(f"{address}/empty/index.html")
    browser.wait_for(PROBLEM)
    assert (
        browser.evaluate(PROBLEM) == "tfm_bundle/bundle.json cannot be read (404): export the bundle into this folder."
    )
    assert browser.evaluate("document.getElementById('loading').hidden")
    assert browser.evaluate("document.getElementById('word').disabled")
