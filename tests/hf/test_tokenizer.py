"""Tokenizers and templates of conversations."""

import json
import shutil

import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

import tokenizers

import meshwright as mw
from tests.hf.test_references import REFERENCES

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    folder = shutil.copytree(REFERENCES / "llama", tmp_path / "llama")
    write(folder, {"<s>": 0, "a": 1, "b": 2, "ab": 63})
    return folder


def write(folder, vocab, template=TEMPLATE):
    model = tokenizers.models.WordLevel(vocab, unk_token="<s>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_text_becomes_tokens_and_back(folder):
    tokenizer = mw.hf.load(folder).tokenizer
    assert tokenizer.encode("a ab") == [1, 63]
    assert tokenizer.decode([1, 63]) == "a ab"


def test_conversations_are_written_as_the_template_says(folder):
    tokenizer = mw.hf.load(folder).tokenizer
    messages = [{"role": "user", "content": "a b"}]
    assert tokenizer.chat(messages) == "<s>[user] a b[assistant]"
    assert tokenizer.chat(messages, answer=False) == "<s>[user] a b"
    with pytest.raises(mw.CheckpointError, match="failed: no tools"):
        tokenizer.chat([{"role": "tool", "content": ""}])


def test_a_template_runs_nothing_but_itself(folder):
    write(folder, {"<s>": 0}, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(mw.CheckpointError, match="failed: access to attribute '__class__'"):
        mw.hf.load(folder).tokenizer.chat([])


def test_a_tokenizer_of_another_model_or_none(folder):
    write(folder, {"<s>": 0, "a": 64})
    with pytest.raises(mw.CheckpointError, match="tokens up to number 64, and the model's vocabulary has 64; it is"):
        _ = mw.hf.load(folder).tokenizer
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(mw.CheckpointError, match=r"tokenizer.json cannot be read"):
        _ = mw.hf.load(folder).tokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(mw.CheckpointError, match=r"has no tokenizer.json"):
        _ = mw.hf.load(folder).tokenizer
    write(folder, {"<s>": 0}, template="")
    with pytest.raises(mw.CheckpointError, match="has no template of conversations"):
        mw.hf.load(folder).tokenizer.chat([])


def test_templates_have_what_those_of_published_models_use(folder):
    template = (
        "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools | tojson(indent=2) }}"
    )
    write(folder, {"<s>": 0}, template)
    messages = [{"role": "user", "content": "<é>"}] * 5
    text = mw.hf.load(folder).tokenizer.chat(messages, tools=[])
    assert text == '{"role": "user", "content": "<é>"}' * 2 + "4[]"


def test_whatever_a_template_fails_with_is_told(folder):
    write(folder, {"<s>": 0}, "{{ 'a' + messages[0].content }}")
    with pytest.raises(mw.CheckpointError, match=r"the template of conversations of .* failed: can only concatenate"):
        mw.hf.load(folder).tokenizer.chat([{"role": "user", "content": None}])
