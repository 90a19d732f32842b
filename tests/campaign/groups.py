"""The groups of the campaign by name.

A group is one module of this folder. It has a function `run(rng, size)`, which makes `size` attacks that depend on the
random generator alone and returns their `Tally`, and a number `ROUND`: the size of one call, which should take some ten
seconds. A module must not fail by raising: an attack that ends in a way that is not documented is counted as failed,
with a message that says how to see it again.
"""

GROUPS = {
    "kills": "tests.campaign.kills",
    "distributed-kills": "tests.campaign.distributed_kills",
    "damage": "tests.campaign.damage",
    "hostile-tasks": "tests.campaign.hostile_tasks",
    "hostile-matrices": "tests.campaign.hostile_matrices",
    "library-calls": "tests.campaign.library_calls",
    "hostile-networks": "tests.campaign.hostile_networks",
    "transformers": "tests.campaign.transformers_suites",
}
