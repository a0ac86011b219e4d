"""The program as it was traced, one line an operation, annotated with the chosen shardings."""

from collections.abc import Iterator

from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.notation import notation
from meshwright.parallelism.words import label_words, symbols
from meshwright.plans.records.traced_program import VIRTUAL


def program_lines(facts: AxisFacts) -> Iterator[str]:
    """Arguments, then operations: ``%12 = dot_general  B_x S D · D F_y → B_x S F_y  forward  mlp  # file:line``."""
    program = facts.program
    here = program.touched
    for value, path in enumerate(program.inputs):
        if value not in here:
            continue  # another stage's
        yield f"%{value} = {path}  {_type(facts, value)}  {_symbols(facts, value)}"
    for op in program.running:
        values = ", ".join(f"%{value}" for value in program.made_by(op))
        reads = ", ".join(f"%{value}" for value in program.reads_of(op))
        name, scope = program.primitive(op), label_words(program.labels[program.label[op]]).rpartition("/")[0]
        how = "as its readers need it" if program.assignment[op] == VIRTUAL else notation(facts, op)
        trips = f" ×{program.trips[op]:g}" if program.trips[op] != 1 else ""
        phase, source = program.phases[program.phase[op]], program.sources[program.source[op]]
        yield f"{values} = {name}({reads})  {how}  {phase}{trips}  {scope or '-'}  # {source}"
    for path, value in zip(program.outputs, program.made.tolist(), strict=True):
        if value in here:
            yield f"{path} = %{value}"


def _type(facts: AxisFacts, value: int) -> str:
    shape, dtype, _ = facts.program.types[facts.program.kind[value]]
    return f"{dtype}[{','.join(map(str, shape))}]"


def _symbols(facts: AxisFacts, value: int) -> str:
    spec = facts.spec_of(value, int(facts.program.code[value]))
    return symbols(facts.program.shape(value), facts.letters_of(value), spec)
