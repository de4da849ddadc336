"""What lies in a folder, to compare before and after."""

from pathlib import Path


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, hidden ones too: when it was changed (nanoseconds), and what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
