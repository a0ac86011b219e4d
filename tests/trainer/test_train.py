"""Whole runs: they learn what one device learns, and continue to the bit where they were interrupted."""

import json
import re

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.errors import CheckpointError, TrainingError
from meshwright.trainer.order import Windows, ordered_batches
from meshwright.trainer.settings import Data
from meshwright.trainer.tokens import read_tokens

pytestmark = [pytest.mark.slow, pytest.mark.devices]

STEPS = 6
RUN = {
    "model": "llama-tiny",
    "shape": {"layers": 1},
    "seq": 16,
    "batch_tokens": 256,
    "steps": STEPS,
    "precision": "float32",
    "cluster": "1x8 cpu",
    "method": "zero3",
    "optimizer": {"learning_rate": 1e-2, "options": {"weight_decay": 0.0}},
    "checkpoints": {"every": 2},
    "log": {"every": 1},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["mesh", "ship", "a", "the", "of"], 2000)
    (folder / "a.txt").write_text(" ".join(words))
    return str(folder)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that was not interrupted, with what it printed to its hook."""
    logged = []
    folder = tmp_path_factory.mktemp("whole")
    settings = RUN | {"data": text, "folder": str(folder), "evaluation": {"every": 3, "batches": 1}}
    trained = mw.train(**settings, on_log=lambda step, figures: logged.append((step, figures)), evaluate=_norm)
    return trained, logged, folder, settings


def _norm(step, state):
    return {"weight_norm": float(optax.tree.norm(state["params"]))}


def test_a_run_computes_what_one_device_does(whole, text, tmp_path):
    trained, logged, _, _ = whole
    example = zoo.build("llama-tiny", layers=1, batch=16, seq=16, dtype="float32")
    windows = Windows(read_tokens(Data(path=text), tmp_path), 16, 256, last=0.95)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.0))

    @jax.jit
    def step(params, moments, batch):
        loss, grads = jax.value_and_grad(example.loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss, optax.tree.norm(grads)

    params = jax.jit(lambda key: example.init(key)["params"])(jax.random.key(0))
    moments, losses = optimizer.init(params), []
    for batch in ordered_batches(windows, 16, 0, STEPS, seed=0):
        params, moments, loss, norm = step(params, moments, batch)
        losses.append((float(loss), float(norm)))
    steps = [(figures["loss"], figures["grad_norm"]) for _, figures in logged if "loss" in figures]
    np.testing.assert_allclose(steps, losses, rtol=2e-4)
    assert trained.step == STEPS and losses[-1][0] < losses[0][0]
    held_out = Windows(read_tokens(Data(path=text), tmp_path), 16, 256, first=0.95)
    (batch,) = ordered_batches(held_out, 16, 0, 1, seed=None)
    assert trained.figures["held_out_loss"] == pytest.approx(float(jax.jit(example.loss)(params, batch)), rel=2e-3)
    assert trained.figures["weight_norm"] == pytest.approx(float(optax.tree.norm(params)), rel=1e-3)


def test_a_run_that_ended_early_continues_to_the_bit(whole, text, tmp_path, monkeypatch, capsys):
    """The scheduler's signal after three steps: the run saves and ends, and the next one does the other three."""
    trained, _, folder, settings = whole
    asked = iter([False, False, True])
    monkeypatch.setattr("meshwright.trainer.train.preempted", lambda: next(asked, False))
    settings = settings | {"folder": str(tmp_path / "run")}
    ended = mw.train(**settings)
    assert ended.step == 3 and not ended.is_complete
    assert "continuing" not in capsys.readouterr().out
    resumed = mw.train(**settings)
    assert resumed.is_complete
    assert "continuing from step 3 of 6" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trained.state)
    keys = ("step", "loss", "grad_norm", "held_out_loss")
    lines = [
        [{key: json.loads(line).get(key) for key in keys} for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, tmp_path / "run")
    ]
    assert [line for line in lines[1] if line["loss"]] == [line for line in lines[0] if line["loss"]]
    assert mw.saved_steps(tmp_path / "run" / "checkpoints") == [4, 6]
    assert mw.train(**settings).step == STEPS  # and once more: there is nothing left to do


def test_a_pipeline_evaluates_by_steps_that_learn_nothing(whole, text, tmp_path):
    """Its losses, of training and held out, are those of the run on one mesh."""
    _, logged, _, settings = whole
    recipe = {"data": 1, "pipeline": 2, "microbatch": 8}
    own = {"method": "auto", "cluster": "1x2 cpu", "recipe": recipe, "folder": str(tmp_path), "steps": 3}
    found = []
    staged = mw.train(**settings | own, on_log=lambda step, figures: found.append((step, figures)))
    assert len(staged.plan.stages) == 2 and "held_out_loss" in found[-1][1]
    expected = logged[: len(found)]
    for name in ("loss", "grad_norm", "held_out_loss"):
        one, other = (
            [(step, figures[name]) for step, figures in lines if name in figures] for lines in (found, expected)
        )
        np.testing.assert_allclose(one, other, rtol=2e-4)
    assert int(staged.state["step"]) == 3 and mw.saved_steps(tmp_path / "checkpoints") == [2, 3]


def test_a_folder_of_another_run_is_refused(whole, text):
    _, _, folder, settings = whole
    with pytest.raises(
        TrainingError, match=r"began with seed = 0, not 1, so it cannot continue with the same model and batches"
    ):
        mw.train(**settings | {"seed": 1})
    with pytest.raises(TrainingError, match=r"began with model = llama-tiny, not qwen-tiny"):
        mw.train(**settings | {"model": "qwen-tiny"})
    (folder / "other.txt").write_text("other text " * 200)
    with pytest.raises(TrainingError, match=r"began with other data"):
        mw.train(**settings | {"data": str(folder / "other.txt")})


def test_adapters_are_trained_and_the_weights_stay(text, capsys):
    settings = RUN | {"data": text, "lora": {"rank": 2, "targets": ["q", "v"]}, "steps": 2, "method": "auto"}
    trained = mw.train(**settings)
    assert sorted(trained.state["params"]) == ["layers/0/q", "layers/0/v"]
    assert all(float(abs(pair["up"]).max()) > 0 for pair in trained.state["params"].values())
    example = zoo.build("llama-tiny", layers=1, batch=16, seq=16, dtype="float32")
    fresh = jax.jit(lambda key: example.init(key)["params"])(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, trained.state["frozen"], fresh)
    assert re.match(r"plan +Auto on mesh", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama-tinny"}, "Unknown model .llama-tinny.. Did you mean .llama-tiny."),
        ({"model": "wide-resnet-250m", "shape": {}}, "has no sequence"),
        ({"shape": {"layer": 1}}, "no option 'layer'"),
        ({"lora": {"targets": ["query"]}}, "lora.targets has 'query', which is no weight of llama-tiny; there are"),
        ({"method": "zero3", "pipeline": True}, "method, pipeline and recipe each say how the step is split"),
        ({"method": "auto", "pipeline": True, "recipe": {"pipeline": 2}}, "give one of them"),
        ({"method": "auto", "recipe": {"pipelines": 2}}, "recipe has no 'pipelines'; the nearest is pipeline"),
        ({"method": "auto", "recipe": {"pipeline": 2}, "recompute": "full"}, "chooses what each stage recomputes"),
        ({"method": "auto", "pipeline": True, "lora": {}, "export": "tuned"}, "adapters are added to .* on one mesh"),
        ({"export": "nowhere/tuned"}, "export is nowhere/tuned, and there is no folder nowhere; make it first"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_planned(change, message, text):
    with pytest.raises(mw.MeshwrightError, match=message):
        mw.train(**RUN | {"data": text} | change)


class Planned(Exception):
    """Raised in place of planning."""


def instead_of_planning(function, *, method, **_):
    raise Planned(method)


def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(text, tmp_path, monkeypatch):
    pytest.importorskip("meshwright.hf", reason="models of Hugging Face need the extra [hf]", exc_type=ImportError)
    monkeypatch.setattr("meshwright.trainer.train.parallelize", instead_of_planning)
    with pytest.raises(CheckpointError, match="the zoo's mamba is no architecture of transformers"):
        mw.train(**RUN | {"data": text, "model": "mamba-tiny", "export": str(tmp_path / "out")})


@pytest.mark.parametrize(
    ("change", "pipeline"),
    [({}, "auto"), ({"evaluation": {}}, False), ({"lora": {}, "export": "tuned"}, False), ({"lora": {}}, "auto")],
)
def test_stages_are_looked_for_only_where_a_run_can_have_them(change, pipeline, text, monkeypatch):
    monkeypatch.setattr("meshwright.trainer.train.parallelize", instead_of_planning)
    with pytest.raises(Planned) as raised:
        mw.train(**RUN | {"data": text, "method": "auto"} | change)
    assert raised.value.args == (mw.Auto(pipeline=pipeline),)


def test_what_does_not_fit_says_that_no_stages_were_looked_for(text):
    settings = RUN | {"data": text, "method": "auto", "cluster": "1x8 cpu", "evaluation": {}}
    with pytest.raises(
        mw.DoesNotFit, match="No plan in stages was looked for: evaluation then takes a whole step"
    ) as raised:
        mw.train(**settings | {"shape": {"layers": 1, "hidden": 2**20}})
    assert raised.value.needed_bytes > raised.value.limit_bytes


def test_a_run_that_saved_nothing_begins_anew_with_other_batches(text, tmp_path):
    settings = RUN | {"data": text, "folder": str(tmp_path), "steps": 1}
    with pytest.raises(TrainingError, match="has 'query'"):
        mw.train(**settings | {"seq": 32, "lora": {"targets": ["query"]}})
    assert mw.train(**settings).step == 1
    with pytest.raises(TrainingError, match="began with seq = 16, not 32"):
        mw.train(**settings | {"seq": 32})


def test_a_save_that_fails_is_one_sentence(text, tmp_path, monkeypatch):
    """A full disk, as Orbax meets it; `tests/training/saving/test_saving.py` has what is left on disk then."""

    def full(*_, **__):
        raise CheckpointError("step 2 could not be saved: No space left on device")

    monkeypatch.setattr("meshwright.trainer.train.save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        mw.train(**RUN | {"data": text, "folder": str(tmp_path / "run")})
    assert mw.saved_steps(tmp_path / "run" / "checkpoints") == []


def test_a_checkpoint_is_fine_tuned_and_written_with_its_adapters(text, tmp_path):
    """The weights that are written are those that were read, plus what the adapters have learned."""
    hf = pytest.importorskip("meshwright.hf", reason="models of Hugging Face need the extra [hf]", exc_type=ImportError)
    tiny = zoo.build("llama-tiny", layers=1, batch=16, seq=16, dtype="float32")
    base = tiny.init(5)["params"]
    hf.save(tmp_path / "base", base, tiny.config)
    shared = {name: value for name, value in RUN.items() if name not in ("model", "shape")}
    settings = shared | {"path": str(tmp_path / "base"), "data": text, "steps": 2, "export": str(tmp_path / "tuned")}
    trained = mw.train(**settings, lora={"rank": 2, "targets": ["q"]})
    jax.tree.map(np.testing.assert_array_equal, trained.state["frozen"], base)
    tuned = hf.load(tmp_path / "tuned").params
    pair = jax.tree.map(np.asarray, trained.state["params"]["layers/0/q"])
    product = 8.0 * np.einsum("dz,znh->dnh", pair["down"], pair["up"])
    np.testing.assert_allclose(tuned["layers"][0]["q"], base["layers"][0]["q"] + product, atol=1e-6)
    np.testing.assert_array_equal(tuned["layers"][0]["k"], base["layers"][0]["k"])
    with pytest.raises(TrainingError, match=r"export is .*tuned, which is there already"):
        mw.train(**settings)


def test_all_weights_of_a_checkpoint_are_trained_from_what_they_are(text, tmp_path):
    hf = pytest.importorskip("meshwright.hf", reason="models of Hugging Face need the extra [hf]", exc_type=ImportError)
    tiny = zoo.build("llama-tiny", layers=1, batch=16, seq=16, dtype="float32")
    base = tiny.init(5)["params"]
    hf.save(tmp_path / "base", base, tiny.config)
    shared = {name: value for name, value in RUN.items() if name not in ("model", "shape")}
    settings = shared | {"path": str(tmp_path / "base"), "data": text, "steps": 1}
    trained = mw.train(**settings | {"optimizer": {"name": "sgd", "learning_rate": 0.0}})
    jax.tree.map(np.testing.assert_array_equal, trained.state["params"], base)
