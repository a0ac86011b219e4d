"""What the ids of programs are of, for tests of passes."""


def named(program):
    """By id the name of an operation, or what it is of a loop or a conditional; a checkpoint's is its first's."""
    found = {one.id: one.name for one in reversed(list(program.walk())) if not one.is_checkpoint}
    for one in program.walk():
        ids = (one.carry_ids, one.slice_ids, one.result_ids)
        found |= {number: word for word, some in zip(("carry", "slice", "result"), ids, strict=True) for number in some}
    return found


def same_names(program, changed):
    """Whether what a pass has made of a program has the names of what it says that it was."""
    before, after = named(program), named(changed.program)
    return bool(changed.former) and all(before[old] == after[new] for new, old in changed.former.items())
