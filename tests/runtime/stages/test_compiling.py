"""Programs of stages: equal ones are compiled once, and JAX's own cache keeps them where the user has one."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import meshwright as mw
from meshwright.runtime.stages.compiling import compile_programs
from tests.runtime.stages.models import build, compared

pytestmark = pytest.mark.devices


@pytest.fixture
def compilations(monkeypatch):
    """The programs that XLA compiles."""
    found = []
    compile_one = jax.stages.Lowered.compile

    def counted(lowered, *args, **kwargs):
        found.append(lowered)
        return compile_one(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return found


def test_equal_stages_are_compiled_once_and_run_on_their_own_devices(compilations):
    with jax.enable_x64(True):
        worst, step = compared(*build(layers=10, width=32), mw.ThreeD(pipeline=4, microbatch=4, checkpoint="full"))
        assert worst < 1e-12
        sizes = [last - first for first, last in (stage.layers for stage in step.last_plan.stages)]
        assert len(set(sizes[:3])) == 1 and len(sizes) == 4  # the last stage has the head besides
        programs = step.recent.engine.lowered
        like = set()
        for one in programs.values():
            text = one.jitted.lower(*one.types).as_text()
            # Programs that leave out other arguments are other programs.
            assert not one.types or f"%arg{len(one.types) - 1}: " in text
            like.add(text)
        compilations.clear()
        compiled = compile_programs(list(programs.values()))
    in_the_middle = sum(stage == 1 for _, stage, _ in programs)
    assert in_the_middle > 3 and len(compilations) == len(like) == len(programs) - in_the_middle
    for key, one in zip(programs, compiled, strict=True):
        shardings = jax.tree.leaves((one.input_shardings, one.output_shardings))
        assert {d for s in shardings for d in s.device_set} == {*programs[key].devices}


def test_the_users_own_cache_keeps_the_programs_of_equal_stages_too(tmp_path):
    """XLA's CPU backend saves a program that it has loaded without its machine code."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], str(tmp_path))
        jax.config.update(names[1], 0)
        compilation_cache.reset_cache()
        kept = []
        for _ in ("cold", "warm"):
            worst, _ = compared(*build(layers=4), mw.ThreeD(pipeline=4, microbatch=8), steps=1)
            assert worst < np.float32(1e-4)
            kept.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    cold, warm = ({name for name in names if name.startswith("jit_")} for names in kept)
    assert {"jit_forward", "jit_backward", "jit_update"} <= {name.split("-")[0] for name in cold}
    assert cold == warm
