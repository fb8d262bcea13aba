"""The page of `megarl report` in a browser, as a file and live."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port
from report_runs import rollout, write_folder, write_rollouts
from screens import needs_chromium, outside, screen
from tiny_run import ROOT

from megarl.cli.main import main


class Page:
    """A report in the browser."""

    def __init__(self, browser: Any, address: str, tab: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(f"{address}#{tab}")
        self.wait("document.documentElement.dataset.ready === 'true'")

    def js(self, expression: str) -> Any:
        return self.browser.execute_script(f"return {expression}")

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Until it is true."""
        ended = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < ended, f"{expression}: {self.js('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def type(self, field: str, text: str) -> None:
        """As a person does who replaces what is there."""
        self.js(f"(f => {{ f.value = {json.dumps(text)}; f.dispatchEvent(new Event('input')) }})({one(field)})")

    def pick(self, field: str, value: str) -> None:
        """Of a list."""
        self.js(f"(f => {{ f.value = {json.dumps(value)}; f.dispatchEvent(new Event('change')) }})({one(field)})")

    def press(self, keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(keys).perform()

    @property
    def count(self) -> str:
        return str(self.js(f"{one('#count')}.textContent"))

    def column(self, number: int) -> list[str]:
        """Texts of a column of the rollouts' rows in view."""
        rows = f"[...document.querySelectorAll('.row')].map(r => r.children[{number}].textContent)"
        return list(self.js(rows))

    def errors(self) -> list[Any]:
        return list(self.browser.get_log("browser"))


def one(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"


def written(tmp_path: Path, *runs: Path) -> str:
    out = tmp_path / "out.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out.as_uri()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a report of two runs; one differs in a key, and used a GPU."""
    folder = tmp_path_factory.mktemp("two")
    a = write_folder(folder / "first")
    b = write_folder(folder / "second", seed=1, steps=8, data={"seed": 7})
    rows = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    memory = {"memory/update_gib": 30.5, "memory/generate_gib": 9.5}
    rows = [row | memory | {"perf/timestamp_s": 1.8e9 + 9 * row["step"]} for row in rows]
    (b / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    budget = {"accelerator": "GPU", "bytes": 80 * 2**30, "phases": {"update": {"weights": 2**34, "gradients": 2**33}}}
    (b / "memory.json").write_text(json.dumps(budget))
    return written(folder, a, b)


@needs_chromium
def test_curves_of_two_runs(browser: Any, two: str) -> None:
    page = Page(browser, two, "curves")
    assert page.js("[...document.querySelectorAll('.run')].map(r => r.textContent)") == ["first", "second"]
    page.wait("Curves.cards[0].canvas.chart")
    card = 'Curves.cards.find(c => c.metric === "reward/mean")'
    assert page.js(f"{card}.canvas.chart.series.map(s => [s.name, s.x.length])") == [["first", 12], ["second", 8]]
    colors = (
        "(c => { const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = {};"
        "for (let i = 0; i < p.length; i += 4) if (p[i + 3] === 255) seen[[p[i], p[i + 1], p[i + 2]]] = true;"
        "return Object.keys(seen) })"
    )
    drawn = page.js(f"{colors}({card}.canvas)")
    assert {"74,120,220", "239,145,24"} <= set(drawn)  # the two runs' own
    assert page.count == "7 metrics"
    page.press("/")
    page.press("reward")
    page.wait(f"{one('#count')}.textContent === '1 metrics'")
    assert page.js("[...document.querySelectorAll('.card')].map(c => c.dataset.metric)") == ["reward/mean"]
    page.js("document.querySelectorAll('.run')[0].click()")
    page.wait("Curves.cards[0].canvas.chart && Curves.cards[0].canvas.chart.series.length === 1")
    page.js("document.querySelectorAll('.run')[0].click()")
    page.wait("Curves.cards[0].canvas.chart && Curves.cards[0].canvas.chart.series.length === 2")
    assert page.js("smoothed([1, null, 3], 0.5)") == [1, None, pytest.approx(7 / 3)]
    box = "Curves.cards[0].canvas.getBoundingClientRect()"
    at = f"{{clientX: {box}.right - 9, clientY: {box}.top + 20, bubbles: true}}"
    page.js(f"Curves.cards[0].canvas.dispatchEvent(new PointerEvent('pointermove', {at}))")
    soft = [
        sum(0.6 ** (n - k) * k / n for k in range(1, n + 1)) / sum(0.6 ** (n - k) for k in range(1, n + 1))
        for n in (12, 8)
    ]
    said = page.js(f"{one('#tip')}.innerText").split()
    assert said == [*("first,", "step", "12", "1", f"({soft[0]:.5g})", "second,", "step", "8", "1", f"({soft[1]:.5g})")]
    page.js("Curves.enlarge('reward/mean')")
    page.js("(HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }) && 0")
    page.js(f"{one('#dialog button')}.click()")
    name, picture = page.js("window.saved")
    assert name == "reward_mean.png" and picture.startswith("data:image/png;base64,iVBORw0KGgo")
    page.js(f"{one('#dialog')}.close()")
    page.pick("#axis", "time")
    ends = page.js("Curves.cards[0].canvas.chart.series.map(s => s.x.at(-1) * 3600)")
    assert ends == pytest.approx([12 * 2.0, 7 * 9.0])  # steps of 2 s together; by the clock of the second run's rows
    page.type("#smooth", "0")
    page.js(f"{one('#log')}.click()")
    page.wait("Curves.log && Curves.smooth === 0")
    assert page.errors() == []


@needs_chromium
def test_rollouts_are_filtered_sorted_and_coloured(browser: Any, two: str) -> None:
    page = Page(browser, two, "rollouts")
    page.wait(f"{one('#response')}")
    assert page.count == "80 of 80 rollouts"
    assert page.column(0)[0] == "12" and page.js(f"{one('#detail')}.innerText").startswith("run first")
    for field, text, left in (
        *(("#reward-from", "1", 20), ("#step-to", "5", 10), ("#search", "2 + 2", 4), ("#search", "", 10)),
        *(("#step-to", "", 20), ("#reward-from", "", 80), ("#search", "11 3", 1), ("#search", "(", 0)),
        ("#search", "", 80),
    ):
        page.type(field, text)
        page.wait(f"{one('#count')}.textContent === '{left} of 80 rollouts'")
    for select, value, left in (("#source", "1", 40), ("#finish", "1", 10), ("#finish", "", 40), ("#run", "1", 16)):
        page.pick(select, value)
        page.wait(f"{one('#count')}.textContent === '{left} of 80 rollouts'")
    for select in ("#source", "#run"):
        page.pick(select, "")
    page.js(f"{one('[data-sort=reward]')}.click()")
    assert set(page.column(1)[:20]) == {"1"}
    page.js(f"{one('[data-sort=reward]')}.click()")
    assert set(page.column(1)[:20]) == {"0"}
    page.js(f"{one('[data-sort=text]')}.click()")
    texts = page.js("[...Rollouts.order].map(i => Rollouts.texts[i])")
    assert texts == sorted(texts) and len(texts) == 80

    page.js(f"{one('[data-sort=step]')}.click()")
    page.js(f"{one('.row')}.click()")
    page.wait(f"{one('#detail')}.innerText.includes('step 12')")
    backgrounds = "[...document.querySelectorAll('#response .tok')].map(t => t.style.backgroundColor)"
    good, bad, hot = "rgba(24, 128, 76, 0.55)", "rgba(205, 52, 60, 0.18", "rgba(226, 118, 16, 0.45)"
    assert page.js("document.documentElement.dataset.theme") == "light"
    colors = page.js(backgrounds)
    assert colors[:2] == [good, good] and colors[2].startswith(bad) and colors[3].endswith(", 0)")
    page.pick("#color", "logp")
    page.wait(f"{backgrounds}[1] === '{hot}'")
    assert page.js(f"{one('#response')}.textContent") == "12 0</s>"
    assert "right 1" in page.js(f"{one('#detail')}.innerText") and "short 0.5" in page.js(f"{one('#detail')}.innerText")
    page.press("j")
    page.wait(f"{one('#response')}.textContent === '12 1</s>'")
    page.js(f"{one('#group')}.click()")
    page.wait(f"{one('#count')}.textContent === '4 of 80 rollouts'")
    page.js(f"{one('#only')}.click()")
    page.js(f"{one('#across')}.click()")  # "0 + 0 =": steps 3, 6, 9, 12 of the first run, 3, 6 of the second
    page.wait(f"{one('#count')}.textContent === '24 of 80 rollouts'")
    assert page.column(0)[:1] == ["3"]
    assert page.errors() == []


@needs_chromium
def test_timeline_memory_and_settings(browser: Any, two: str) -> None:
    page = Page(browser, two, "timeline")
    ranks = "[...document.querySelectorAll('#rank-table [data-rank]')].map(r => r.textContent)"
    assert page.js(ranks) == [*("rank 03.00 s2.70 s1.80 s", "rank 13.00 s2.70 s0.0 ms", "rank 23.00 s2.70 s1.80 s")]
    assert page.js(f"{one('.straggler')}.dataset.rank") == "1"
    assert page.js(f"{one('#straggler')}.textContent").startswith("Rank 1 is the one that others wait for")
    assert page.js("[...new Set(Timeline.bars.map(b => b.rank))]") == [0, 1, 2]
    assert page.js("Timeline.marks.map(m => m.step)") == [10, 11, 12]
    page.press("\ue012")  # arrow left
    assert page.js("Timeline.marks.map(m => m.step)") == [9, 10, 11]
    page.press("4")
    page.wait(one('[data-run="second"]'))
    text = page.js(f"{one('main')}.innerText")
    assert text.index("generate") < text.index("update")  # as in a step
    assert all(word in text for word in ("80.00 GiB", "30.50 GiB", "24.00 GiB", "6.50 GiB")) and "first" not in text
    page.press("5")
    page.wait(one("#settings"))
    assert page.js("[...document.querySelectorAll('#settings tr')].map(r => r.innerText.split(/\\s+/))") == [
        *(["key", "default", "first", "second"], ["data.seed", "1", "1", "7"])
    ]
    page.pick("#settings-only", "all")
    assert int(page.count.split()[0]) > 100
    page.press("t")
    assert page.js("document.documentElement.dataset.theme") == "dark"
    page.press("t")
    assert page.errors() == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_tab_fits_a_narrow_screen(browser: Any, two: str, theme: str) -> None:
    with screen(browser, 390, 844):
        for tab in ("curves", "rollouts", "timeline", "memory", "configuration"):
            page = Page(browser, two, tab)
            if page.js("document.documentElement.dataset.theme") != theme:
                page.js(f"{one('#theme')}.click()")
            assert page.js("document.documentElement.dataset.theme") == theme
            assert page.js("document.querySelectorAll('#tabs button, #theme, #help').length") == 7
            assert outside(browser) == [], tab
        page.press("?")
        assert outside(browser) == []
        page.js(f"{one('#dialog button')}.click()")
        page.pick("#settings-only", "all")
        cells = f"[...{one('#settings')}.rows].find(r => r.innerText.includes('data.seed')).innerText.split('\\n')"
        assert page.js(cells) == ["data.seed", "1", "1", "7"]
        label = f"getComputedStyle({one('#settings td:last-child')}, '::before').content"
        assert page.js(label) == '"second: "'
        assert page.errors() == []


@needs_chromium
@pytest.mark.slow
def test_a_run_of_very_many_steps(browser: Any, tmp_path: Path) -> None:
    """More numbers than a function takes as arguments."""
    run = write_folder(tmp_path / "long", steps=1)
    row = '{"step": %d, "memory/update_gib": %s, "reward/mean": 0.5}\n'
    (run / "metrics.jsonl").write_text("".join(row % (step, 30 + step % 2) for step in range(1, 150_001)))
    page = Page(browser, written(tmp_path, run), "curves")
    page.wait("Curves.cards[0].canvas.chart")
    page.press("4")
    page.wait(one('[data-run="long"]'))
    assert "31.00 GiB" in page.js(f"{one('main')}.innerText") and page.errors() == []


@needs_chromium
def test_texts_of_a_run_stay_text(browser: Any, tmp_path: Path) -> None:
    attack = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    run = write_folder(tmp_path / "<img src=x onerror=alert(1)>", steps=2, data={"prompt_key": attack})
    turns = [["policy", attack], ["environment", attack]]
    texts = dict.fromkeys(("prompt", "response", "source", "answer", "error"), attack)
    records = [
        rollout(1, 0, **texts, parts={attack: 1.0}, tokens=[attack, "<b>", "\ud800", "x"]),
        rollout(1, 1, response=attack, turns=turns, turn_lengths=[2, 2], tokens=[attack, "", attack, "<b>"]),
        rollout(1, 2, response=attack, turns=turns),
    ]
    write_rollouts(run, 1, records)
    write_rollouts(run, 2, [])
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, attack: 1.0}) + "\n")
    page = Page(browser, written(tmp_path, run), "rollouts")
    for place in range(3):
        page.js(f"Rollouts.open({place})")
        page.wait(f"{one('#detail')}.innerText.includes('sample {place}')")
        assert attack in page.js(f"{one('#detail')}.textContent")
    for key in "1345":
        page.press(key)
    assert attack in page.js(f"{one('#settings')}.textContent")
    assert page.js("document.querySelectorAll('img').length") == 0
    assert "owned" not in page.js("document.title")
    assert page.errors() == []


@needs_chromium
def test_episodes_are_shown_as_turns(browser: Any, tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", steps=1)
    turns = [["policy", "6*7"], ["environment", "42"], ["policy", "So 42."]]
    tokens = {"tokens": ["6", "*7", "42", "So", " 42."], "logp": [-1.0] * 5, "advantage": [1, 1, 0, 1, 1], "gap": None}
    write_rollouts(run, 1, [rollout(1, 0, turns=turns, turn_lengths=[2, 1, 2], error="timed out", **tokens)])
    page = Page(browser, written(tmp_path, run), "rollouts")
    page.wait(one("#response"))
    who = "[...document.querySelectorAll('#response .who')].map(w => [w.textContent, w.nextSibling.textContent])"
    assert page.js(who) == turns
    colored = "[...document.querySelectorAll('#response .turn')].map(t => t.children[0].style.backgroundColor !== '')"
    assert page.js(colored) == [True, False, True]
    assert "timed out" in page.js(f"{one('#detail')}.innerText")


def many_rollouts(folder: Path, count: int, per_step: int = 1000) -> Path:
    run = write_folder(folder, steps=count // per_step)
    words = ["let", "us", "add", "the", "numbers", "and", "check", "that", "the", "sum", "of", "all", "is", "right"]
    for step in range(1, count // per_step + 1):
        records = []
        for i in range(per_step):
            tokens = [f" {words[(i * 7 + j * 3) % len(words)]}" for j in range(40)]
            numbers = {name: [round(((i + j) % 97) / 97 - 0.5, 4) for j in range(40)] for name in ("advantage", "gap")}
            numbers["logp"] = [-abs(x) for x in numbers["gap"]]
            text = f"{''.join(tokens)} {step * per_step + i}"
            more = {"length": 40, "response": text, "reward": float(i % 8 == 0), "group": i // 8, "index": i // 8}
            records.append(rollout(step, i % 8, tokens=tokens, prompt=f"Add {i // 8} and 9.", **numbers, **more))
        write_rollouts(run, step, records)
    return run


@needs_chromium
@pytest.mark.slow
def test_a_hundred_thousand_rollouts_open_and_filter(browser: Any, tmp_path: Path) -> None:
    address = written(tmp_path, many_rollouts(tmp_path / "run", 100_000))
    page = Page(browser, address, "rollouts")
    page.wait(f"{one('#count')} && {one('#count')}.textContent === '100,000 of 100,000 rollouts'")
    page.type("#search", "sum of")
    page.type("#search", "right 77123")
    page.wait(f"{one('#count')}.textContent === '0 of 100,000 rollouts'")
    page.type("#search", " 77123")
    page.wait(f"{one('#count')}.textContent === '1 of 100,000 rollouts'")
    page.type("#search", "")
    page.type("#reward-from", "1")
    page.wait(f"{one('#count')}.textContent === '12,500 of 100,000 rollouts'")
    page.js(f"{one('[data-sort=text]')}.click()")
    assert page.js("document.querySelectorAll('.row').length") < 100
    assert page.errors() == []


# live


def asked(address: str, host: str | None = None) -> bytes:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=500) as answer:
        content: bytes = answer.read()
    return content


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run that is followed, and the page's address; Ctrl-C ends the server without a word."""
    run = write_folder(tmp_path / "run", steps=4)
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "megarl.cli.main", "report", str(run), "--serve", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/[\w-]{{32}}/  \(Ctrl-C ends it\)\n", line)
        yield run, line.split()[0]
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=500)
        assert (server.returncode, out, err) == (0, "", "")
    finally:
        server.kill()
        server.wait()


def test_the_server_is_for_this_machine_alone(live: tuple[Path, str]) -> None:
    run, address = live
    versions = json.loads(asked(f"{address}blocks"))
    assert {"runs", "settings", "curves-0", "timeline-0", "rollouts-0", "texts-0-0", "details-0-0"} <= set(versions)
    curves = json.loads(gzip.decompress(asked(f"{address}blocks/curves-0")))
    assert curves["steps"] == [1, 2, 3, 4]
    for path, host, code in (("", "evil.example", 403), ("blocks/none", None, 404), ("blocks/../x", None, 403)):
        with pytest.raises(urllib.error.HTTPError, match=str(code)):
            asked(address + path, host)
    port = address.split(":")[2].partition("/")[0]
    listening = Path("/proc/net/tcp").read_text().lower()
    assert f"0100007f:{int(port):04x}" in listening and f"00000000:{int(port):04x}" not in listening
    assert main(["report", str(run), "--serve", port]) == 2  # the port is taken


def test_the_server_answers_nobody_without_the_secret(live: tuple[Path, str]) -> None:
    """And whoever only connects, or begins a request and does not end it, takes no room."""
    _, address = live
    base, secret = re.findall(r"(http://[^/]+)/([^/]+)/", address)[0]
    there = (base.rpartition("/")[2].partition(":")[0], int(base.rpartition(":")[2]))
    for path in ("/", "/blocks", "/blocks/settings", "/x/blocks", f"/{secret[:-1]}/blocks", f"/{secret}x/", "/%ff/"):
        with pytest.raises(urllib.error.HTTPError, match=r"40[34]"):
            asked(base + path)
    half = [socket.create_connection(there) for _ in range(300)]
    for one_half in half:
        one_half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    assert json.loads(asked(f"{address}blocks"))
    until = time.monotonic() + 60
    while sum(map(_is_open, half)) > 64 and time.monotonic() < until:
        time.sleep(0.1)
    assert sum(map(_is_open, half)) <= 64
    for one_half in half:
        one_half.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.slow
@needs_chromium
def test_a_live_page_follows_a_run_that_goes_on_and_goes_back(browser: Any, live: tuple[Path, str]) -> None:
    run, address = live
    page = Page(browser, address, "rollouts")
    page.wait(f"{one('#count')} && {one('#count')}.textContent === '16 of 16 rollouts'")
    page.type("#reward-from", "1")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    with open(run / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 5, "reward/mean": 0.5, "new/metric": 1.0}) + "\n")
    write_rollouts(run, 5, [rollout(5, sample) for sample in range(4)])
    page.wait(f"{one('#count')}.textContent === '5 of 20 rollouts'")  # the filter stays
    (run / "metrics.jsonl").write_text("".join(lines[:2]))  # back to step 2
    for step in (3, 4, 5):
        (run / "rollouts" / f"step_{step:06d}.jsonl").unlink()
    page.wait(f"{one('#count')}.textContent === '2 of 8 rollouts'")
    page.press("1")
    page.wait("report.runs[0].curves.steps.length === 2")
    with open(run / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 3, "reward/mean": 0.5, "new/metric": 1.0}) + "\n")
    page.wait("[...document.querySelectorAll('.card')].some(c => c.dataset.metric === 'new/metric')")
    assert page.errors() == []
