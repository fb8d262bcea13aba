"""The tool that kills a run and resumes it, at the moments in which a checkpoint could be lost."""

from __future__ import annotations

import json
from pathlib import Path

import kill_and_resume
import pytest
from tiny_run import write_run


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_a_run_that_is_killed_while_it_saves_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], local: bool
) -> None:
    config = write_run(tmp_path, trainer__total_training_steps=24, trainer__val_before_train=False)
    out = tmp_path / "out"
    moments = ("save", "copy from the node's disk" if local else "write", "between manifest and rename")
    options = [*(word for moment in moments for word in ("--moment", moment)), "--kills", "3", "--out", str(out)]
    overrides = ["trainer.test_freq=0", f"checkpoint.local_dir={tmp_path / 'local' if local else ''}"]
    assert kill_and_resume.main([*options, str(config), *overrides]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 tensors differ; metrics equal: True" in said
    kills = json.loads((out / "kills.json").read_text())
    assert [(kill["moment"], kill["left"]) for kill in kills] == [(moment, 0) for moment in moments]
    partial = kills[2]["partial"]  # whole, but for its name; with a local disk the next one may have begun, too
    assert partial and all(".global_step_" in name for name in partial)
