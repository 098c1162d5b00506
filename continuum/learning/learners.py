"""All that the policy learns from turns as they run, assembled once."""

from __future__ import annotations

from continuum.config import PUBLISHED_RULES, ContinuumConfig
from continuum.jobs.branches import BranchListener
from continuum.jobs.job import Turn
from continuum.learning.answer_returns import AnswerReturns
from continuum.learning.context_growth import ContextGrowth
from continuum.learning.gap_corrections import GapCorrections
from continuum.learning.gap_learner import GapLearner
from continuum.learning.job_work import JobWork
from continuum.learning.kv_cost import KvCost
from continuum.learning.program_stats import QueueDelay, RecomputedShare
from continuum.learning.remaining_work import RemainingWork
from continuum.learning.tool_gaps import PublishedGaps
from continuum.learning.tool_stats import ToolStats
from continuum.learning.work_forecast import WorkForecast
from engine.core.policy import PolicyContext
from engine.records.lessons import Lesson
from estimator.learned.models import Model
from estimator.learned.work_model import WorkModel


class Learners:
    """What is learned, by subject."""

    def __init__(self, tools: ToolStats, context: PolicyContext, config: ContinuumConfig) -> None:
        self.tools = tools
        self.published = PublishedGaps() if config.ttl_rule in PUBLISHED_RULES else None
        """Gaps as the papers define them; None unless the rule is a paper's."""
        self.corrections = GapCorrections(tools, collects=config.learn_order)
        self.gaps = GapLearner(tools, self.corrections, self.published, context.block_size)
        self.remaining = RemainingWork(tools)
        self.work = JobWork(WorkForecast(), self.remaining, config.kind_tokens // context.block_size)
        self.growth = ContextGrowth(tools, context, config.growth_horizon_s)
        self.kv_cost = KvCost(config, has_host_tier=context.has_host_tier)
        self.queue_delay = QueueDelay()
        self.recomputed_share = RecomputedShare(config.recomputed_smoothing)
        self.answers = AnswerReturns(config.answer_ttl_s)

    @property
    def before_admission(self) -> tuple[BranchListener, ...]:
        """Listeners that must have an event before the working set, which predicts from what they know."""
        return (self.corrections, self.growth)

    @property
    def after_admission(self) -> tuple[BranchListener, ...]:
        """Listeners that change what the working set predicts from, after it has forgotten the tip."""
        return (self.gaps, self.work, self.remaining, self.answers)

    def admitted(self, turn: Turn, now: float) -> None:
        if turn.tip is not None and turn.pin is None:
            self.queue_delay.observe(now - turn.request.arrival_time)
        if turn.num_known_tokens:
            self.recomputed_share.observe(turn.num_known_tokens, turn.num_recomputed_tokens)

    def ended(self, turn: Turn, now: float) -> None:
        self.kv_cost.observe(turn, now)
        self.work.turn_ended(turn, now)
        self.growth.turn_ended(turn, now)

    def take_model(self, model: Model) -> None:
        """Uses a model that the trainer made."""
        if isinstance(model, WorkModel):
            self.work.learned(model)
        else:
            self.tools.duration_model = model

    def take_lesson(self) -> Lesson | None:
        """The next lesson for the trainer; None if none is due."""
        return self.remaining.take_lesson() or self.corrections.take_lesson()
