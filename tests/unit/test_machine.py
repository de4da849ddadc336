"""What the machine allows, read from the files in which Linux says it."""

from pathlib import Path

import psutil
import pytest

from trainer.common.machine import filesystem_of, host_memory_limit_bytes

MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\n"}


def machine(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "5000\n"}, 5000),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "5000\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/other/memory.max": "7\n",
            },
            5000,
        ),
        ({"proc/self/cgroup": "0::/a/path/of/the/host\n", "sys/fs/cgroup/memory.max": "4000"}, 4000),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            },
            3000,
        ),
    ],
    ids=["no group", "v2 above", "v2 unlimited", "container", "v1"],
)
def test_the_least_limit_counts(files, limit, tmp_path):
    assert host_memory_limit_bytes(machine(tmp_path, MEMINFO | files)) == limit


def test_nobody_may_say(tmp_path):
    assert host_memory_limit_bytes(tmp_path) is None
    assert filesystem_of(Path("/tmp"), tmp_path) == ""


def test_this_machine():
    limit = host_memory_limit_bytes()
    assert limit is not None
    assert limit <= psutil.virtual_memory().total
    assert filesystem_of(Path("/dev/shm")) == "tmpfs"
    assert filesystem_of(Path("/proc/self")) == "proc"


def test_the_innermost_mount_counts(tmp_path):
    lines = "27 1 254:0 / / rw - ext4 /dev/vda rw\n30 25 0:27 / /mnt/fast\\040disk rw shared:1 - xfs /dev/nvme0 rw\n"
    root = machine(tmp_path, {"proc/self/mountinfo": lines})
    for path, expected in {"/mnt/fast disk/x": "xfs", "/mnt/fast": "ext4", "/mnt/fast disks": "ext4"}.items():
        assert filesystem_of(Path(path), root) == expected, path
