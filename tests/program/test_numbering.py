"""What a pass has made is numbered anew, and knows which operations of the program before it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.program.numbering import Changed, numbered, unchanged
from meshwright.program.program import UNPLANNED, Program
from meshwright.program.text import program_form
from tests.generator.programs import Drawn
from tests.program.ids import same_names


@pytest.mark.parametrize("seed", range(6))
def test_a_program_that_no_pass_has_changed_is_numbered_as_it_was(seed):
    drawn = Drawn(seed)
    program = Program.of(jax.make_jaxpr(drawn)(*drawn.args))
    again = numbered(program)
    for described in (str, lambda one: one.scope, lambda one: (one.id, one.num_ids)):
        assert list(map(described, again.program.walk())) == list(map(described, program.walk()))
    assert again.former == unchanged(program).former and same_names(program, again)
    assert program_form(numbered(again.program).program) == program_form(again.program)


def test_ids_follow_one_another_and_what_was_added_stands_for_nothing():
    program = Program.of(jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)) + 1)(1.0))
    sine, cosine, addition = program.operations
    program.operations[:] = [sine, cosine._replace(id=UNPLANNED), addition]
    changed = numbered(program)
    assert [one.id for one in changed.program.operations] == [0, 1, 2] and changed.former == {0: 0, 2: 2}
    assert Changed(program, {0: 2, 1: 1}).after(changed).former == {0: 2}


def test_a_loop_that_is_left_a_part_of_keeps_the_ids_of_what_is_left():
    def loop(x, scales):
        return jax.lax.scan(lambda c, s: ((c[0] + s, c[1] * s), (c[0], s * 2)), (x, x), scales)

    program = Program.of(jax.make_jaxpr(loop)(1.0, np.arange(4.0)))
    (whole,) = program.operations
    (left,) = program.needed([program.outputs[1]])
    part = program.copy()
    part.operations[:], part.outputs[:] = [left], [program.outputs[1]]
    changed = numbered(part)
    (again,) = changed.program.operations
    ids = (again.carry_ids, again.slice_ids, again.result_ids)
    found = [[changed.former[number] for number in some] for some in ids]
    assert found == [[whole.carry_ids[1]], list(whole.slice_ids), []]
