"""What is said of a search for generating sets before it begins."""

from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.search import prepare_search
from jpmhc.report.generating_sets import describe_cost


def test_cost_is_said_beforehand():
    assert "11,104,365,420" not in describe_cost(prepare_search(Question(5, 4)))
    long = describe_cost(prepare_search(Question(6, 6), "exhaustive", workers=2))
    assert "days" in long or "hours" in long
    assert "a local search looks at 10 of them" in describe_cost(prepare_search(Question(8, 4), moves=10))
