"""The check of `make docs` names links that lead nowhere and everything that is loaded from another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_site import problems


def site(folder: Path, body: str, **files: str) -> Path:
    (folder / "sub").mkdir()
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>")
    (folder / "sub/page.html").write_text('<h1 id="top">Page</h1><a href="../index.html">home</a>')
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.parametrize("body", [
    '<a href="sub/page.html#top">page</a>',
    '<a href="/sub/page.html">from the root</a>',
    '<i id="here"></i><a href="#here">here</a>',
    '<a href="https://example.org/page">another host, followed only by a click</a>',
    '<link rel="canonical" href="https://example.org/"><a href="mailto:a@example.org">mail</a>',
    '<img src="data:image/png;base64,AA">',
])
def test_a_sound_site_has_no_problems(tmp_path: Path, body: str) -> None:
    assert list(problems(site(tmp_path, body))) == []


@pytest.mark.parametrize(("body", "problem"), [
    ('<a href="gone.html">x</a>', "gone.html leads to no file"),
    ('<a href="sub">x</a>', "sub leads to no file"),
    ('<a href="../outside.html">x</a>', "../outside.html leads to no file"),
    ('<a href="sub/page.html#gone">x</a>', "sub/page.html#gone leads to no anchor"),
    ('<a href="#gone">x</a>', "#gone leads to no anchor"),
    ('<img src="gone.png">', "gone.png leads to no file"),
    ('<img src="https://example.org/a.png">', "loads https://example.org/a.png"),
    ('<script src="//example.org/a.js"></script>', "loads //example.org/a.js"),
    ('<link rel="stylesheet" href="https://example.org/a.css">', "loads https://example.org/a.css"),
    ('<link rel="preconnect" href="https://example.org">', "loads https://example.org"),
    ("<style>@import 'https://example.org/a.css';</style>", "loads https://example.org/a.css"),
    ('<p style="background: url(//example.org/a.png)">x</p>', "loads //example.org/a.png"),
    ('<pre class="mermaid">graph</pre>', "the theme fetches mermaid from a content network"),
])
def test_each_problem_of_a_page_is_told(tmp_path: Path, body: str, problem: str) -> None:
    assert list(problems(site(tmp_path, body))) == [f"index.html: {problem}"]


def test_what_styles_and_drawings_load_from_other_hosts_is_told(tmp_path: Path) -> None:
    folder = site(tmp_path, "", a_css="b { background: url('https://example.org/b.png') }",
                  a_svg='<svg xmlns:xlink="http://www.w3.org/1999/xlink"><image xlink:href="https://example.org/c.png"/></svg>')
    assert list(problems(folder)) == ["a.css: loads https://example.org/b.png", "a.svg: loads https://example.org/c.png"]
