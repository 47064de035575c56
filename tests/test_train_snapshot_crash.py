"""Whenever a process that saves is killed, the latest snapshot is whole, and none that was reported saved is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 25

# One process imports torch; then, again and again, a child of it saves as fast as it can and is killed.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from labkit.mesh import Placement
from labkit.train.snapshots import latest_snapshot, random_states, save_snapshot

torch.set_num_threads(1)  # a thread pool does not survive a fork
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(0)

def save_for_ever(reported):
    last = latest_snapshot(folder)
    step = 0 if last is None else last.step
    while True:
        step += 1
        w, b = torch.full((300, 200), float(step)), torch.full((step % 50,), float(step))
        tensors = {"w": (w, Placement.of(w)), "b": (b, Placement.of(b))}
        save_snapshot(folder, step, tensors=tensors, state={"step": step}, rank_state=random_states())
        os.write(reported, b"%d\\n" % step)

amid = lost = torn = 0
steps = []
for _ in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(write)
    os.close(write)
    with open(read) as lines:
        began = time.perf_counter()
        reported = [int(lines.readline())]
        time.sleep(rng.random() * 2 * (time.perf_counter() - began))  # within the next two or so
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported += [int(line) for line in lines]
    amid += any(path.name.startswith((".saving-", ".removing-")) for path in folder.iterdir())
    snapshot = latest_snapshot(folder)
    step = snapshot.step
    good = torch.all(snapshot.read("w") == step) and snapshot.read("b").tolist() == [step] * (step % 50)
    torn += bool(snapshot.refused) or not good or snapshot.state != {"step": step}
    lost += reported[-1] > step
    steps.append(step)
left = [path.name for path in folder.iterdir() if path.name.startswith("step-")]
print(json.dumps({"amid": amid, "lost": lost, "torn": torn, "steps": steps, "left": len(left)}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_writer_killed_at_any_moment_leaves_the_latest_snapshot_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["torn"] == 0 and seen["lost"] == 0
    assert seen["steps"] == sorted(set(seen["steps"])) and len(seen["steps"]) == KILLS
    # kills came while something was being written, and between
    assert 0 < seen["amid"]
    assert seen["left"] <= 3  # two stay, and one may have been about to go
