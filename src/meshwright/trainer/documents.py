"""Finds the files of a data folder and reads the documents in them, always in the same order."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import TrainingError

KINDS = (".txt", ".jsonl", ".parquet", ".bin")
_PIECE_BYTES = 1 << 20  # of a text file that is tokenised at once: files may be larger than memory
_SAMPLE_BYTES = 1 << 20  # of a file's beginning and end that its fingerprint covers


@dataclass(frozen=True)
class Files:
    """The files of one data set, sorted by name; all are tokens (``.bin``) or none is."""

    folder: Path
    paths: tuple[Path, ...]

    @property
    def are_tokens(self) -> bool:
        return self.paths[0].suffix == ".bin"

    def fingerprint(self) -> str:
        """A digest of the names, sizes, beginnings and ends of all files."""
        digest = hashlib.sha256()
        for path in self.paths:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(self.folder).as_posix()}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]


def find_files(path: str) -> Files:
    """The files of a data set: one file, or all below a folder that are of a kind that can be read.

    Raises:
        TrainingError: There are none, or one cannot be read.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise TrainingError(f"there is no data at {path}; give a file or a folder with {_listed(KINDS)} files")
    try:
        inside = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
        found = tuple(p for p in inside if p.suffix in KINDS)
        for file in found:
            file.open("rb").close()
    except OSError as error:
        raise TrainingError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if not found:
        what = f"is a {place.suffix or 'nameless'} file" if place.is_file() else f"holds {len(inside)} files, none"
        raise TrainingError(f"the data {path} {what} of a kind that can be read; give {_listed(KINDS)} files")
    if len({file.suffix == ".bin" for file in found}) > 1:
        raise TrainingError(f"the data {path} has .bin files of tokens and files of text; give one or the other")
    return Files(place if place.is_dir() else place.parent, found)


def _listed(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def read_documents(files: Files, field: str) -> Iterator[Iterator[bytes]]:
    """The documents, each as pieces of UTF-8 text.

    A text file is one document, a line of JSON and a row of Parquet as well.

    Args:
        files: Of text.
        field: The field of JSON lines and the column of Parquet that hold the text.
    """
    for path in files.paths:
        if path.suffix == ".txt":
            yield _pieces(path)
        else:
            texts = _json_texts(path, field) if path.suffix == ".jsonl" else _parquet_texts(path, field)
            for text in texts:
                yield iter((text.encode("utf-8", "surrogatepass"),))


def _pieces(path: Path) -> Iterator[bytes]:
    """A text file in pieces that end with a line, so that no word is cut where lines are shorter than a piece."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece + file.readline()


def _json_texts(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise TrainingError(f"line {number} of {path} is no JSON; repair or remove it") from None
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise TrainingError(f"line {number} of {path} has no text in {field!r}; name its field in data.text")
            yield text


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise TrainingError(f"{path} needs pyarrow, which is not installed: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise TrainingError(
                    f"{path} has no column {field!r}; name one in data.text: it has {', '.join(names[:10])}"
                )
            for batch in file.iter_batches(columns=[field]):
                yield from (text for text in batch.column(0).cast("string").to_pylist() if text is not None)
    except ArrowException as error:
        raise TrainingError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
