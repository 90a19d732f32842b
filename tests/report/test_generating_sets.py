"""What is said of a search for generating sets before it begins."""

from jpmhc.generators.generating_sets import plan
from jpmhc.generators.generator_candidates import Question
from jpmhc.report.generating_sets import describe_cost


def test_cost_is_said_beforehand():
    assert "11,104,365,420" not in describe_cost(plan(Question(5, 4)), 2)
    long = describe_cost(plan(Question(6, 6), "exhaustive"), 2)
    assert "days" in long or "hours" in long
    assert "a local search looks at 10 of them" in describe_cost(plan(Question(8, 4), moves=10), 2)
