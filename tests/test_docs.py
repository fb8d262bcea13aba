"""The documentation site: it builds without a warning, needs nothing from elsewhere, and knows what the code knows."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DOCS, PAGES, ROOT, TEXTS
from pydantic import BaseModel
from screens import needs_chromium, outside, screen

pytest.importorskip("mkdocs", reason="launch/requirements-docs.txt is not installed")

from megarl.algorithms.methods import METHODS
from megarl.config import Config
from megarl.config.load import all_keys
from megarl.rewards.registry import names
from megarl.telemetry.metrics import METRICS
from megarl_docs import algorithms, cells, commands, formulas, keys, migration, plans, tables

pytestmark = pytest.mark.slow  # launch/test.sh builds the site in any case


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_site_and_nothing_else_of_docs(site: Path) -> None:
    for path in PAGES:
        assert (site / path.relative_to(DOCS)).with_suffix(".html").is_file()
    assert not list(site.rglob("*.py"))


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    for path in site.rglob("*.html"):
        assert not fetched.findall(path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_every_key_has_its_place_and_a_description(site: Path) -> None:
    reference = page(site, "reference/keys.html")
    lacking = [key for key in all_keys() if f'id="{key}"' not in reference]
    assert lacking == []
    assert reference.count('<h3 class="key"') == len(list(all_keys()))
    assert [key for key in all_keys() if not _description(key)] == []
    for text in ("<code>dpo</code>", "≥ 1, ≤ 2²⁰", "a class with __len__ and __getitem__"):
        assert text in reference


def _description(key: str) -> str | None:
    section: type[BaseModel] = Config
    *outer, name = key.split(".")
    for part in outer:
        section = section.model_fields[part].annotation  # type: ignore[assignment]
    return section.model_fields[name].description


def test_every_metric_is_shown(site: Path) -> None:
    shown = html.unescape(page(site, "reference/metrics.html").replace("<wbr>", ""))
    assert [metric.name for metric in METRICS if f"<code>{metric.name}</code>" not in shown] == []


def test_every_command_is_shown(site: Path) -> None:
    shown = html.unescape(page(site, "reference/commands.html"))
    found = {" ".join(words) for words, _ in commands.helps([])}
    assert {"", "train", "plan", "eval", "compare", "algorithms"} <= found
    assert [name for name in found if f"megarl {name}".strip() not in shown] == []
    assert "--response-tokens" in shown and "key=value" in shown


def test_every_reward_is_shown(site: Path) -> None:
    shown = page(site, "reference/rewards.html")
    assert [name for name in names() if f'<h2 id="{name}">' not in shown] == []


def test_every_algorithm_has_a_page(site: Path) -> None:
    wanted = {f"{algorithms.FOLDERS[key]}/{name}.md" for key, name in algorithms.known()}
    there = {str(path.relative_to(DOCS / "algorithms")) for path in (DOCS / "algorithms").glob("*/*.md")}
    assert there == wanted
    for key, name in algorithms.known():
        shown = html.unescape(page(site, f"algorithms/{algorithms.FOLDERS[key]}/{name}.html").replace("<wbr>", ""))
        assert f"{key}={name}" in shown
        assert "<math" in shown and "When to use it" in shown
        assert "https://arxiv.org/abs/" in shown or "Williams 1992" in shown
        assert ">def</span>" in shown  # its source


def test_every_method_is_listed_with_what_chooses_it(site: Path) -> None:
    shown = html.unescape(page(site, "algorithms/index.html").replace("<wbr>", ""))
    lacking = [setting for method in METHODS.values() for setting in method.settings if f">{setting}<" not in shown]
    assert lacking == [] and "DAPO" in shown and 'href="flows/kto.html"' in shown


def test_an_algorithm_s_keys_link_to_the_reference(site: Path) -> None:
    gspo = page(site, "algorithms/losses/gspo.html")
    assert 'href="../../reference/keys.html#actor_rollout_ref.actor.clip_ratio_low"' in gspo


def test_formulas_leave_no_latex(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "arithmatex" not in text, path
        drawn = "".join(re.findall(r"<math.*?</math>", text, re.DOTALL))
        assert "\\" not in re.sub(r"<[^>]+>", "", drawn), path


def test_drawings_are_those_of_the_script(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "drawings"))
    import draw

    for name, make in draw.DRAWINGS.items():
        svg = make().svg()
        assert (DOCS / "drawings" / f"{name}.svg").read_text(encoding="utf-8") == svg
        shown = page(site, f"concepts/{name}.html")
        assert svg.partition("<rect")[2] in shown and 'class="drawing" role="img" aria-label="' in shown


# -------------------------------------------------------------------------------------- in a browser, without a server

CLOSED = ".md-sidebar--primary, .md-search"  # what a narrow screen shows when it is opened
WHOLE = ".md-typeset__scrollwrap, .language-bash pre > code, .language-console pre > code"  # what need not be scrolled
CUT = f"[...document.querySelectorAll('{WHOLE}')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
SCHEME = "document.body.dataset.mdColorScheme"
SWITCH = "document.querySelector('[data-md-component=palette] label:not([hidden])')"


def waited_for(browser: Any, expression: str) -> Any:
    """Its value, when there is one: neither null nor an empty list."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 120).until(lambda _: browser.execute_script(f"return {expression}"))


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "every"), [("default", 1), ("slate", 8)])
def test_pages_fit_a_narrow_screen(browser: Any, site: Path, scheme: str, every: int) -> None:
    with screen(browser, 390, 844):
        for path in PAGES[::every]:
            browser.get((site / path.relative_to(DOCS)).with_suffix(".html").as_uri())
            if browser.execute_script(f"return {SCHEME}") != scheme:
                waited_for(browser, SWITCH)
                browser.execute_script(f"{SWITCH}.click()")
            assert browser.execute_script(f"return {SCHEME}") == scheme
            assert outside(browser, closed=CLOSED) == [], path
            assert browser.execute_script(f"return {CUT}") == [], path


@needs_chromium
@pytest.mark.slow
def test_a_narrow_screen_shows_cards_whole_commands_and_readable_drawings(browser: Any, site: Path) -> None:
    with screen(browser, 390, 844):
        browser.get((site / "troubleshooting.html").as_uri())
        label = browser.execute_script("return getComputedStyle(document.querySelector('td'), '::before').content")
        assert label == '"symptom: "'
        browser.get((site / "concepts" / "step.html").as_uri())
        assert browser.execute_script("return document.querySelector('.drawing').getBoundingClientRect().width") >= 720
        browser.get((site / "howto" / "offline.html").as_uri())
        shown = browser.execute_script("return document.querySelector('.language-bash code').innerText")
        assert shown.rstrip() in (DOCS / "howto" / "offline.md").read_text(encoding="utf-8")  # what copying gives


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("words", ["data.answer_key", "answer_key"])
def test_the_search_finds_a_key_without_a_server(browser: Any, site: Path, words: str) -> None:
    browser.get("about:blank")
    browser.get((site / "index.html").as_uri())
    browser.find_element("css selector", "input.md-search__input").send_keys(words)
    hits = waited_for(browser, "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert "reference/keys.html" in hits[0] and hits[1].endswith("#data.answer_key")


def test_plans_fit_and_are_called_predictions(site: Path) -> None:
    found = [plans.plan_of(case) for case in plans.CASES]
    assert [plan.code for plan in found] == [0] * len(found)
    assert all(20 < plan.peak < 139 for plan in found)
    assert found[0].parameters == "494 million" and found[-1].parameters.endswith(" billion")
    assert 650 < float(found[-1].parameters.split()[0]) < 700 and plans.CASES[-1].gpus == 1024
    scaling = page(site, "howto/scaling.html")
    assert "<strong>predictions</strong>" in scaling
    assert all(plan.layout in scaling for plan in found)


def test_links_of_texts_outside_the_site() -> None:
    for path in TEXTS:
        if path.is_relative_to(DOCS):
            continue  # mkdocs looks at these
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (ROOT / link).exists(), f"{path.name}: {link}"


def test_the_readme_stays_short_and_says_what_is_not_here_once() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 140
    for word in ("FSDP", "DeepSpeed", "Ray", "pickled", "trust_remote_code", "| serving |"):
        assert text.count(word) == 1, word


def test_issue_forms_ask_for_what_is_needed() -> None:
    forms = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
    assert [path.stem for path in forms] == ["bug", "feature", "question"]
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        ids = [item["id"] for item in form["body"]]
        assert len(ids) == len(set(ids)) and "doctor" in ids
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (own,) = hooks["repos"]
    assert own["repo"] == "local" and {hook["language"] for hook in own["hooks"]} == {"system"}


# ------------------------------------------------------------------------------------------ what pages are made of


def test_text_of_the_code_is_not_marked_up() -> None:
    assert tables.plain("a_b *c* `d_e` <f>") == r"a\_b \*c\* `d_e` &lt;f>"
    assert tables.cell("a |\n b") == r"a \| b"
    assert tables.code("a|b<c") == "<code>a&#124;b&lt;c</code>"


def test_cells_name_their_column_and_may_be_broken() -> None:
    table = (
        "<table><tr><th>a <em>b</em></th><th></th></tr><tr><td>1</td><td class='x'><code>reward.overlong_buffer</code>"
    )
    assert cells.fitted(f"<td>{table}</td></tr></table>") == (
        "<td><table><tr><th>a <em>b</em></th><th></th></tr>"
        '<tr><td data-label="a b">1</td><td data-label="" class=\'x\'>'
        "<code>reward.<wbr>overlong_<wbr>buffer</code></td></tr></table>"
    )


def test_formulas_become_mathml() -> None:
    drawn = formulas.as_mathml(r'<p>x <span class="arithmatex">\(a &lt; b_t\)</span></p>')
    assert drawn.startswith("<p>x <math") and "<msub>" in drawn and "arithmatex" not in drawn
    assert 'display="block"' in formulas.as_mathml('<div class="arithmatex">\\[\n x \\]</div>')


def test_links_to_keys() -> None:
    assert keys.anchor("actor.clip_ratio") == (
        "[<code>actor.clip_ratio</code>](../../reference/keys.md#actor_rollout_ref.actor.clip_ratio)"
    )
    assert keys.anchor("no.such_key") == "<code>no.such_key</code>"


def test_papers_become_links() -> None:
    assert algorithms.with_links("A, arXiv 2305.18290, eq. 7; B: 2503.01491") == (
        "A, [arXiv 2305.18290](https://arxiv.org/abs/2305.18290), eq. 7; B: "
        "[arXiv 2503.01491](https://arxiv.org/abs/2503.01491)"
    )


def test_migration_has_a_table_of_each_kind() -> None:
    """A column for the key here only where it is another."""
    same, other, none = migration.reference("verl").split("### verl: ")[1:]
    assert same.startswith("the same here\n\n| verl's key | what is different, or why |\n")
    assert other.startswith("another key here\n\n| verl's key | here | what is different, or why |\n")
    assert none.startswith("none here\n\n| verl's key | what is different, or why |\n")
    assert "<code>data.train_files</code>" in same


def test_every_test_that_the_security_page_names_exists() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 10
    assert all((ROOT / file).is_file() for file in re.findall(r"`(tests/\w+\.py)", (ROOT / "SECURITY.md").read_text()))
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
