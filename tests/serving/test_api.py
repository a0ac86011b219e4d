"""`mw.get_model`: the shape of Hugging Face's `generate`, plans over several devices, and what is refused."""

from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parents[1] / "hf" / "references"
SIZES = {"max_len": 96, "slots": 4, "chunk": 8, "block_size": 4}
END = 2  # the token that ends a text in the references' configurations


def texts(name):
    tensors = load_file(REFERENCES / name / "reference.safetensors")
    return [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]


@pytest.fixture(scope="module")
def llama():
    with mw.get_model(REFERENCES / "llama", cluster="1x1 cpu", **SIZES) as model:
        yield model


def test_prompts_of_unequal_lengths_are_followed_by_new_tokens_and_padding(llama):
    first, second = texts("llama")
    out = llama.generate([first[:20], second[:7]], max_new_tokens=10, eos_token_id=(), pad_token_id=63)
    assert out.dtype == np.int64
    assert out[0].tolist() == first[:30]
    assert out[1].tolist() == second[:17] + [63] * 13
    padded = np.array([first[:20], [0] * 13 + second[:7]])
    mask = np.array([[1] * 20, [0] * 13 + [1] * 7])
    again = llama.generate(padded, attention_mask=mask, max_length=30, eos_token_id=())
    assert again[0].tolist() == first[:30]
    assert again[1, :30].tolist() == [0] * 13 + second[:17]
    assert llama.generate(first[:20], max_new_tokens=1, eos_token_id=()).shape == (1, 21)


def test_a_token_of_the_end_ends_a_text_unless_it_is_held_back(llama):
    first = texts("llama")[0]
    end = first[24]
    stopped = llama.generate(first[:20], max_new_tokens=30, eos_token_id=end)[0].tolist()
    assert stopped == first[: first.index(end, 20) + 1]
    held = llama.generate(first[:20], max_new_tokens=8, min_new_tokens=8, eos_token_id=[end, 5])[0, 20:]
    assert len(held) == 8
    assert not {end, 5} & set(held[:7].tolist())


def test_draws_are_repeated_by_their_seed(llama):
    options = {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "eos_token_id": ()}
    one = llama.generate([1, 2, 3], seed=5, num_return_sequences=3, **options)
    assert one.shape == (3, 23)
    assert len({tuple(row) for row in one.tolist()}) == 3
    np.testing.assert_array_equal(one, llama.generate([1, 2, 3], seed=5, num_return_sequences=3, **options))
    assert list(llama.stream([1, 2, 3], seed=6, **options)) == one[1, 3:].tolist()


def test_arguments_may_be_numbers_of_numpy_or_none_as_for_transformers(llama):
    first = texts("llama")[0]
    end, told = first[24], {"max_new_tokens": np.int64(9)}
    expected = first[: first.index(end, 20) + 1]
    for ends in (np.int64(end), np.array([end, 63]), [np.int32(end)]):
        assert llama.generate(first[:20], eos_token_id=ends, **told)[0].tolist() == expected
    unset = llama.generate(first[:20], temperature=None, top_p=None, top_k=None, eos_token_id=(), **told)
    assert unset[0].tolist() == first[:29]
    masked = llama.generate([7, *first[:20]], attention_mask=[0] + [1] * 20, eos_token_id=(), **told)
    assert masked[0].tolist() == [7, *first[:29]]


def test_a_number_that_no_device_can_read_ends_no_engine(llama):
    drawn = {"do_sample": True, "seed": 3, "max_new_tokens": 5, "eos_token_id": ()}
    of_all = llama.generate([1, 2, 3], top_k=None, **drawn)
    np.testing.assert_array_equal(llama.generate([1, 2, 3], top_k=2**40, **drawn), of_all)
    assert llama.generate([1], max_new_tokens=3, min_new_tokens=3, eos_token_id=2**40).shape == (1, 4)


def test_a_stream_that_is_left_frees_its_cache(llama):
    stream = llama.stream(texts("llama")[0][:20], max_new_tokens=60, eos_token_id=())
    assert [next(stream) for _ in range(3)] == texts("llama")[0][20:23]
    stream.close()
    assert llama.generate([1, 2], max_new_tokens=2).shape[0] == 1
    assert llama.engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": []}, "input_ids must be tokens"),
        ({"input_ids": [[]]}, "input_ids must be tokens"),
        ({"input_ids": [[0.5]]}, "input_ids must be tokens"),
        ({"input_ids": [[64]]}, "the prompt has token 64, and the vocabulary goes from 0 to 63"),
        ({"input_ids": [[1]], "max_new_tokens": 96}, "at most 96 can be served"),
        ({"input_ids": [[1]], "max_new_tokens": 0}, "max_tokens is 0"),
        ({"input_ids": [[1, 2]], "max_length": 2}, "max_length is 2"),
        ({"input_ids": [[1]], "do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
        ({"input_ids": [[1]], "num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"input_ids": [[1]], "num_return_sequences": 2.5}, "num_return_sequences is 2.5; give a whole number"),
        ({"input_ids": [[1]], "max_new_tokens": 2.5}, "max_tokens is 2.5; give a whole number"),
        ({"input_ids": [[1]], "max_new_tokens": "5"}, "max_tokens is '5'; give a whole number"),
        ({"input_ids": [[1]], "max_length": "5"}, "max_length is '5'; give a whole number"),
        ({"input_ids": [[1]], "do_sample": True, "temperature": "hot"}, "temperature is 'hot'; give a number"),
        ({"input_ids": [[1]], "do_sample": True, "top_k": 2.5}, "top_k is 2.5; give a whole number"),
        ({"input_ids": [[1]], "seed": "a"}, "seed is 'a'; give a whole number"),
        ({"input_ids": [[1]], "eos_token_id": "2"}, "eos_token_id is .*'2'.*; give a whole number"),
        ({"input_ids": [[1]], "pad_token_id": "x"}, "pad_token_id is 'x'; give a whole number"),
        ({"input_ids": [[1]], "attention_mask": 1}, "must have the shape of input_ids"),
        ({"input_ids": [[1]], "attention_mask": [[0]]}, "leaves nothing of a prompt"),
        ({"input_ids": [[1]], "attention_mask": [[1, 1]]}, "must have the shape of input_ids"),
        ({"input_ids": [[1]], "min_new_tokens": 3, "eos_token_id": range(9)}, "9 tokens would end the text"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_a_sentence(llama, arguments, message):
    with pytest.raises(mw.ServingError, match=message):
        llama.generate(**arguments)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, method", [("llama", "tensor"), ("mixtral", "zero3"), ("gemma2", "data")])
def test_plans_over_eight_devices_generate_the_same(name, method):
    with mw.get_model(REFERENCES / name, method=method, **SIZES) as model:
        whole = texts(name)
        out = model.generate([text[:-64] for text in whole] * 2, max_new_tokens=64, eos_token_id=())
        assert [row[: len(text)].tolist() for row, text in zip(out, whole * 2, strict=True)] == whole * 2
        assert model.plan.decode.mesh.num_devices == 8
        assert "96 blocks of 4 tokens" in str(model.plan)


def test_experts_that_are_dealt_over_devices_generate_the_same():
    experts = mw.Manual({f"params/layers/*/{name}": jax.P("x") for name in ("gate", "up", "down")})
    with mw.get_model(REFERENCES / "mixtral", cluster="1x4 cpu", method=experts, **SIZES) as model:
        whole = texts("mixtral")
        out = model.generate([text[:-64] for text in whole], max_new_tokens=64, eos_token_id=())
        assert [row[: len(text)].tolist() for row, text in zip(out, whole, strict=True)] == whole
        assert "Expert parallel over 4 CPU devices" in str(model.plan)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"slots": 0}, mw.ServingError, "slots is 0"),
        ({"cache": "pages"}, mw.ServingError, "cache is 'pages'"),
        ({"max_len": 97}, mw.ServingError, "positions for 96 tokens"),
        ({"slo": mw.Slo(tpot_s=1e-9)}, mw.ServingError, "longer than slo promises"),
        ({"wrong": 1}, mw.CheckpointError, "no option 'wrong'"),
        ({"cluster": "1x16 cpu"}, mw.ClusterError, "for 16 devices and there are 8"),
    ],
)
def test_models_that_cannot_be_served_are_refused_before_anything_is_compiled(options, error, message):
    with pytest.raises(error, match=message):
        mw.get_model(REFERENCES / "gpt2", **options)


def test_a_promise_makes_steps_smaller():
    from meshwright.profiler import cluster
    from meshwright.serving.promised import keeping, step_prices
    from meshwright.serving.scheduling import Limits
    from meshwright.serving.sizes import Sizes
    from meshwright.zoo import build

    prices = step_prices(build("llama3-8b").config, cluster("1x1 h200"), 1)
    limits = Limits(256, 2048, 256, 2048, 2304, 100, 2048)
    loose, tight = (keeping(mw.Slo(tpot_s=tpot_s), prices, limits, Sizes()) for tpot_s in (0.1, 0.02))
    assert (loose.slots, loose.chunk) == (256, 2048)
    assert tight.slots == 256
    assert tight.chunk < 512
    assert keeping(mw.Slo(tpot_s=0.006), prices, limits, Sizes()).slots < 128
    assert keeping(mw.Slo(tpot_s=0.1), prices, limits, Sizes(slots=3, chunk=100)) == Sizes(slots=3, chunk=100)
