"""Is the plan that `mw.plan` gives who asks for nothing special the one that an expert would defend?

Models that people train, on clusters and at batches on which they train them, planned by `mw.plan(step, state, batch,
cluster=…)` with no other argument. What is recomputed is as the code says: each model of the first part is planned as
plain code and with `jax.checkpoint` around all but products and fused attention ("selective"), the others with that
alone. The published utilisation is that of a run of about this model and size on such devices. Utilisation counts the
products of the model, without recomputation, as publications do; seconds to plan are seconds of one core. Rows are kept
from run to run: the machine named below is that of the latest.

    python benchmarks/expert.py [WORD …] [--jobs 1] [--seconds 3600]    # the cases with these words; others are kept
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import sliced_table

COLUMNS = ("case", "plan", "step s", "simulated s", "utilisation", "published", "GiB", "seconds to plan")
PLAIN, SELECTIVE, FULL = "none", "selective", "full"


@dataclass(frozen=True)
class Case:
    """A model, where it is trained and how, and the utilisation that was published for about that."""

    model: str
    cluster: str
    batch: int
    seq: int | None
    published: float | None
    checkpoints: tuple[str, ...] = (PLAIN, SELECTIVE)

    def __str__(self) -> str:
        return f"{self.model}, {self.cluster}, {self.batch}" + (f" × {self.seq}" if self.seq else "")


CASES = (
    Case("deepseek-v3", "256x8 h100", 15360, 4096, None, (FULL,)),
    Case("llama3-8b", "1x8 h100", 64, 8192, 0.42),
    Case("llama3-8b", "16x8 h100", 512, 8192, 0.42),
    Case("llama3-70b", "32x8 h100", 512, 8192, 0.41),
    Case("llama3-405b", "64x8 h100", 512, 8192, 0.38),
    Case("gpt3-175b", "128x8 a100-80gb", 1536, 2048, 0.51),
    Case("mixtral-8x7b", "16x8 h100", 512, 4096, 0.39),
    Case("llama2-13b", "50x4 a100-40gb", 800, 4096, 0.50),
    Case("qwen3-32b", "16x8 h100", 512, 4096, None, (SELECTIVE,)),
    Case("gemma3-27b", "16x8 h100", 512, 8192, None, (SELECTIVE,)),
    Case("gpt-oss-120b", "32x8 h100", 1024, 4096, None, (SELECTIVE,)),
    Case("vit-22b", "32x8 h100", 4096, None, None, (SELECTIVE,)),
    Case("llama3-8b", "8x8 h100", 8, 131072, None, (PLAIN,)),
    Case("llama3-8b", "64x8 h100", 8, 1048576, None, (PLAIN,)),
    Case("gpt2-1.5b", "1x8 a10g", 512, 1024, None, (SELECTIVE,)),
)


def planned(case: Case, checkpoint: str) -> list[str]:
    """A row: the plan in one sentence, its times, its utilisation, and what it took to find it."""
    import meshwright as mw
    from meshwright import zoo
    from meshwright.parallelism.sentence import plain_sentence

    shape = {"batch": case.batch} | ({"seq": case.seq} if case.seq else {})
    example = zoo.build(case.model, checkpoint=checkpoint, **shape)
    name, published = f"{case} ({checkpoint})", "" if case.published is None else f"{case.published:.2f}"
    before = time.process_time()
    try:
        plan = mw.plan(
            example.train_step, example.state, example.batch, cluster=case.cluster, on_progress=lambda _: None
        )
    except mw.DoesNotFit as error:
        seconds = f"{time.process_time() - before:.0f}"
        return [name, f"none: {error}", "", "", "", published, "", seconds]
    seconds = time.process_time() - before
    simulated = plan.simulate()
    figures = (f"{plan.step_s:.2f}", f"{simulated.step_s:.2f}", f"{simulated.mfu:.2f}", published)
    return [name, plain_sentence(plan), *figures, f"{plan.memory.peak_bytes / 2**30:.0f}", f"{seconds:.0f}"]


def main() -> None:
    """Plans the cases, each in a process of its own."""
    pairs = {f"{case} ({checkpoint})": (case, checkpoint) for case in CASES for checkpoint in case.checkpoints}
    sliced_table("Expert", __doc__ or "", COLUMNS, planned, pairs)


if __name__ == "__main__":
    main()
