"""Scalars that stages exchange between two rounds of the update, packed: one array for each stage, round and dtype."""

from dataclasses import dataclass, field

from meshwright.runtime.microbatches.part import Key
from meshwright.runtime.stages.cutting.stage_programs import StageProgram, StagePrograms, is_packed

Pack = tuple[int, int, str]  # stage, round, dtype


@dataclass(frozen=True)
class Packs:
    """The packed scalars of an update.

    Attributes:
        values: The values of each pack, in order.
        place: For each packed value, its pack and its place in it.
        readers: The stages that read each pack.
    """

    values: dict[Pack, list[int]] = field(default_factory=dict)
    place: dict[int, tuple[Pack, int]] = field(default_factory=dict)
    readers: dict[Pack, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, programs: StagePrograms) -> "Packs":
        """Packs what can be packed of what is exchanged."""
        found = cls()
        program = programs.steps[0].program
        for turn, sent in programs.rounds.sent.items():
            for value, source, target in sent:
                if not is_packed(program, value):
                    continue
                pack = (source, turn, str(program.types[value].dtype))
                some = found.values.setdefault(pack, [])
                if value not in found.place:
                    found.place[value] = (pack, len(some))
                    some.append(value)
                found.readers.setdefault(pack, set()).add(target)
        return found

    def sent(self, stage: int, turn: int) -> list[Pack]:
        """The packs that a stage makes in a round."""
        return sorted(pack for pack in self.values if pack[:2] == (stage, turn))

    def single(self, program: StageProgram) -> list[Key]:
        """The inputs of a program of the update that it does not find in other stages' packs."""
        return [key for key in program.inputs if self._stage(key[0], program) == program.stage]

    def read(self, program: StageProgram) -> list[Pack]:
        """The packs of other stages that a program of the update reads."""
        return sorted({self.place[v][0] for v, _ in program.inputs if self._stage(v, program) != program.stage})

    def _stage(self, value: int, program: StageProgram) -> int:
        return self.place[value][0][0] if value in self.place else program.stage
