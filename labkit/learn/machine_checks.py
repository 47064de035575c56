"""What the machine has: memory, disk, cores, threads, GPUs, and two ranks that hear each other."""

import os
import shutil
from pathlib import Path

import psutil

from labkit.learn.finding import Finding
from labkit.learn.workspace import workspace_folder
from labkit.words import _

GB = 1e9
# a lesson's kernel and four ranks with PyTorch loaded, a model and its data
MEMORY_NEEDED_GB, MEMORY_ADVISED_GB = 2.0, 4.0
DISK_ADVISED_GB = 2.0
# worker processes of a DataLoader hand tensors over in shared memory
SHARED_MEMORY_ADVISED_GB = 0.25


def check_memory() -> Finding:
    """Free memory, within the limit of the container if there is one."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _container_memory()
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - used)
    found = _("{free:.1f} of {total:.1f} GB free").format(free=free / GB, total=total / GB)
    if free < MEMORY_NEEDED_GB * GB:
        remedy = _("close other programs; a lesson with two ranks needs {gb:g} GB").format(gb=MEMORY_NEEDED_GB)
        return Finding("memory", "missing", found, remedy)
    if free < MEMORY_ADVISED_GB * GB:
        remedy = _("close other programs before lessons with four ranks, which like {gb:g} GB")
        return Finding("memory", "note", found, remedy.format(gb=MEMORY_ADVISED_GB))
    return Finding("memory", "ok", found)


def _container_memory(folder: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """The memory limit of a Linux control group and what is used of it, in bytes."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None, 0
    return (int(limit), used) if limit.isdigit() else (None, 0)


def check_disk() -> Finding:
    """Free disk where the learner works and where executed notebooks go."""
    folder = workspace_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GB
    found = _("{free:.1f} GB free in {folder}").format(free=free, folder=folder)
    if not os.access(folder, os.W_OK):
        remedy = _("make {folder} writable, or set LABKIT_WORKSPACE to a folder that is").format(folder=folder)
        return Finding("disk", "missing", _("{folder} can't be written").format(folder=folder), remedy)
    if free < DISK_ADVISED_GB:
        remedy = _("free some: fetched data and executed notebooks take up to {gb:g} GB").format(gb=DISK_ADVISED_GB)
        return Finding("disk", "missing" if free < 0.1 else "note", found, remedy)
    return Finding("disk", "ok", found)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Room in /dev/shm, which containers often keep at 64 MB."""
    if not folder.is_dir():
        return Finding("shared memory", "ok", _("not used on this system"))
    free = shutil.disk_usage(folder).free / GB
    found = _("{free:.2f} GB free in {folder}").format(free=free, folder=folder)
    if free < SHARED_MEMORY_ADVISED_GB:
        return Finding(
            "shared memory", "note", found, _("start the container with more, as in docker run --shm-size=1g")
        )
    return Finding("shared memory", "ok", found)


def usable_cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores() -> Finding:
    """Two cores let two ranks work at the same time."""
    cores = usable_cores()
    found = _("{cores} for this process").format(cores=cores)
    if cores < 2:
        remedy = _("lessons run, but ranks take turns, so that their times say little; take a machine with two or more")
        return Finding("cores", "note", found, remedy)
    return Finding("cores", "ok", found)


def check_threads() -> Finding:
    """Threads that PyTorch would take in one process; each rank takes one."""
    import torch

    threads, asked = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = _("{threads} in a process of PyTorch, 1 in a rank").format(threads=threads)
    if asked:
        found += f" (OMP_NUM_THREADS={asked})"
    if threads > usable_cores():
        remedy = _("unset OMP_NUM_THREADS, or set it to {cores}").format(cores=usable_cores())
        return Finding("threads", "note", found, remedy)
    return Finding("threads", "ok", found)


def check_gpus() -> Finding:
    """GPUs that PyTorch can use. None is fine: every lesson runs on the CPU."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("GPUs", "ok", f"{len(names)}: {', '.join(names)}")
    if shutil.which("nvidia-smi"):
        build = torch.version.cuda or _("none: a CPU build")
        found = _("none for PyTorch, though nvidia-smi is here (CUDA of this PyTorch: {build})").format(build=build)
        return Finding("GPUs", "note", found, _("install PyTorch's CUDA build, or a driver that is new enough for it"))
    return Finding("GPUs", "ok", _("none; every lesson runs on the CPU"))


def _add_up() -> float:
    """On each rank: the sum of rank + 1 over the ranks."""
    import torch
    import torch.distributed as dist

    from labkit import collectives

    mine = torch.tensor([dist.get_rank() + 1.0])
    collectives.all_reduce(mine)
    return float(mine.item())


def check_gloo() -> Finding:
    """Two ranks are started and add up their numbers, as in every lesson."""
    from labkit.ranks import launch

    try:
        sums = launch(_add_up, 2)
    except Exception as error:  # whatever the reason, the line names it
        cause = " ".join(str(error).split()) or type(error).__name__
        remedy = _(
            "let processes of this machine talk to each other over the loopback device (firewall, VPN, container)"
        )
        return Finding("ranks", "missing", _("two ranks failed: {cause}").format(cause=cause[:200]), remedy)
    if sums != [3.0, 3.0]:
        remedy = _("reinstall: remove .venv and run make lab")
        return Finding("ranks", "missing", _("two ranks added 1 and 2 to {sums}").format(sums=sums), remedy)
    return Finding("ranks", "ok", _("two ranks added up their numbers with gloo"))


MACHINE_CHECKS = {
    "memory": check_memory,
    "disk": check_disk,
    "shared memory": check_shared_memory,
    "cores": check_cores,
    "threads": check_threads,
    "GPUs": check_gpus,
    "ranks": check_gloo,
}
