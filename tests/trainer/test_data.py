"""Data of a run: files become the same tokens whatever they are in, and batches do not depend on who reads them."""

import json

import numpy as np
import pytest

from meshwright.errors import TrainingError
from meshwright.trainer.documents import find_files
from meshwright.trainer.order import Windows, check_parts, ordered_batches
from meshwright.trainer.settings import Data
from meshwright.trainer.tokens import Tokens, read_tokens

TEXTS = ["a mesh of ships", "a ship of meshes", "ünïcode, too"]
EXPECTED = [byte for text in TEXTS for byte in (*text.encode(), 0)]  # a zero ends each document


def written(folder, kind):
    """The three documents in files of a kind."""
    folder.mkdir()
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "all.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n\n")
    elif kind == "bin":
        np.array(EXPECTED[:20], np.uint16).tofile(folder / "a.bin")
        np.array(EXPECTED[20:], np.uint16).tofile(folder / "b.bin")
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
        import pyarrow

        parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "all.parquet")
    return Data(path=str(folder))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "bin", "parquet"])
def test_documents_become_tokens(kind, tmp_path):
    data = written(tmp_path / "data", kind)
    tokens = read_tokens(data, tmp_path / "kept")
    assert tokens.read(0, len(tokens)).tolist() == EXPECTED
    assert tokens.read(18, 5).tolist() == EXPECTED[18:23]
    again = read_tokens(data, tmp_path / "kept")
    assert again.fingerprint == tokens.fingerprint
    assert len(list((tmp_path / "kept").glob("*"))) == (kind != "bin")


def test_a_tokenizer_is_used_and_its_end_found(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[end]", "a", "mesh", "of", "ships", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[end]"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a mesh of stars")
    data = Data(path=str(tmp_path / "a.txt"), tokenizer=str(folder))
    with pytest.raises(TrainingError, match=r"nothing says which token of .* ends a document; name it in data.end"):
        read_tokens(data, tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "[end]"}}')
    tokens = read_tokens(data, tmp_path)
    assert tokens.read(0, len(tokens)).tolist() == [1, 2, 3, 5, 0] and tokens.vocab == 6
    with pytest.raises(TrainingError, match="the tokenizer has 6 tokens and the model 5"):
        Windows(tokens, 2, 5)
    np.array([1, 2, 3, 6], np.uint16).tofile(tmp_path / "others.bin")
    tokens = read_tokens(Data(path=str(tmp_path / "others.bin"), tokenizer=str(folder)), tmp_path)
    with pytest.raises(TrainingError, match=r"the data has a token 6, and the tokenizer's are 0 to 5"):
        Windows(tokens, 3, 99)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds 0 files, none of a kind that can be read; give .txt, .jsonl, .parquet or .bin files"),
        ({"a.pdf": b"x"}, "holds 1 files, none of a kind"),
        ({"a.bin": b"abcd", "b.txt": b"x"}, "has .bin files of tokens and files of text"),
        ({"a.bin": b"abc"}, "a.bin has 3 bytes, which are no whole number of uint16 tokens"),
        ({"a.jsonl": b'{"text": "x"}\n{'}, "line 2 of .*a.jsonl is no JSON"),
        ({"a.jsonl": b'{"body": "x"}'}, "line 1 of .*a.jsonl has no text in 'text'; name its field in data.text"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_and_nothing_is_left(files, message, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(TrainingError, match=message):
        read_tokens(Data(path=str(folder)), tmp_path / "kept")
    assert not list((tmp_path / "kept").glob("*"))


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(TrainingError, match="there is no data at /nowhere/at/all"):
        find_files("/nowhere/at/all")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    data = written(tmp_path / "data", "txt")

    class Full:
        """A file on a disk without room."""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, _):
            raise OSError(28, "No space left on device")

    kept = tmp_path / "kept"
    real = type(kept).open

    def opened(path, mode="r", *args, **options):
        real(path, mode, *args, **options).close()
        return Full() if path.suffix == ".part" else real(path, mode, *args, **options)

    monkeypatch.setattr(type(kept), "open", opened)
    with pytest.raises(TrainingError, match=r"tokens cannot be written to .*kept: No space left on device"):
        read_tokens(data, kept)
    assert not list(kept.glob("*"))


def numbered(count, seq):
    """Windows whose first token is their number."""
    return Windows(Tokens([np.repeat(np.arange(count + 1), seq)], "", None), seq, count + 1)


def first_tokens(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def test_batches_do_not_depend_on_the_number_of_processes_or_on_where_a_run_began():
    windows = numbered(10, 4)
    whole = list(ordered_batches(windows, 4, 0, 6, seed=3))
    for num_parts in (2, 4):
        parts = [list(ordered_batches(windows, 4, 0, 6, seed=3, part=p, num_parts=num_parts)) for p in range(num_parts)]
        for number, batch in enumerate(whole):
            for name, array in batch.items():
                np.testing.assert_array_equal(array, np.concatenate([part[number][name] for part in parts]))
    assert first_tokens(ordered_batches(windows, 4, 4, 6, seed=3)) == first_tokens(whole)[4:]
    assert (whole[0]["labels"][:, :-1] == whole[0]["tokens"][:, 1:]).all()


def test_each_pass_has_every_window_once_in_another_order():
    rows = [row for batch in first_tokens(ordered_batches(numbered(10, 4), 5, 0, 4, seed=3)) for row in batch]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    assert first_tokens(ordered_batches(numbered(10, 4), 5, 0, 2, seed=None)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_windows_that_are_held_out_are_no_others():
    tokens = Tokens([np.repeat(np.arange(11), 4)], "", None)
    first, last = Windows(tokens, 4, 11, last=0.8), Windows(tokens, 4, 11, first=0.8)
    assert [int(w[0]) for w in map(first.__getitem__, range(len(first)))] == list(range(8))
    assert [int(w[0]) for w in map(last.__getitem__, range(len(last)))] == [8, 9]


def test_too_little_data_and_tokens_of_others_are_refused():
    with pytest.raises(TrainingError, match="the data has 4 tokens, too few for sequences of 4"):
        Windows(Tokens([np.arange(4)], "", None), 4, 9)
    with pytest.raises(TrainingError, match=r"the data has a token 8, and the model's are 0 to 7; check data.dtype"):
        Windows(Tokens([np.arange(9)], "", None), 8, 8)
    with pytest.raises(TrainingError, match=r"the data has a token 8, and the tokenizer's are 0 to 6; check data.dtyp"):
        Windows(Tokens([np.arange(9)], "", 7), 8, 8)
    with pytest.raises(TrainingError, match="a batch has 6 sequences, which 4 processes cannot share equally"):
        check_parts(6, 4)
