"""What is grpo_llm.py's own: advantages from groups, one prefill for a group, its loop. What it shares is one text with
ppo_llm.py (test_project.py) and tested there; whole iterations: test_oracle.py; ranks: test_ranks.py."""

import math

import pytest
import torch
from helpers import path_of, refusal, run_lines
from ranks import load_script
from test_forward import folder, model, noise  # noqa: F401
from test_math import close

SCRIPT = "grpo_llm"
grpo = load_script(path_of(SCRIPT))
ESTIMATORS = "grpo", "dr_grpo", "rloo", "reinforce_pp"


def advantages(scores, group_size, estimator):
    """By the loop's lines, of responses of two tokens, the second of them masked."""
    mask = torch.tensor([[True, False]]).expand(len(scores), 2)
    given = {"scores": torch.tensor(scores, dtype=torch.float64), "mask": mask}
    given |= dict.fromkeys(("kl", "entropy", "old_logprobs"), torch.zeros(len(scores), 2))  # what a copy may read, too
    found = run_lines(grpo, "rewards", "advantages", args={"group_size": group_size, "estimator": estimator}, **given)
    assert not found.advantages[:, 1].any()
    return found.advantages[:, 0]


ROOT_HALF, W = math.sqrt(0.5), math.sqrt(2.5 / 3)  # W: unbiased std of .5, -.5, 1, -1
PAIR = 1e-4 / (ROOT_HALF * 2e-4 + 1e-6)
GOLDEN = [  # worked out by hand
    ("grpo", 2, [2e-4, 0, 3, 1], [PAIR, -PAIR, ROOT_HALF, -ROOT_HALF]),  # +-0.7071, where the std is far above its eps
    ("reinforce_pp", 2, [1, 0, 3, 1], [0.5 / W, -0.5 / W, 1 / W, -1 / W]),
    ("reinforce_pp", 1, [1, 2, 3, 6], [x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)]),
]


@pytest.mark.parametrize("estimator, group_size, scores, expected", GOLDEN)
def test_golden_advantages(estimator, group_size, scores, expected):
    close(advantages([float(s) for s in scores], group_size, estimator), expected, 1e-5)


CONSTANT = [[0.3, 0.1 + 0.2], [1e6, 1e6 + 0.5], [0.0, 0.0], [-7.0, -7.0], [0.1 + 0.7, 0.8], [1e-7, -1e-7]]
VARIED = [[0.3, 0.3001], [1e6, 1e6 + 2], [0.0, 1e-5], [-7.0, -7.0001]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_constant_group_gets_exactly_zero_and_no_other(estimator):
    for pair in CONSTANT:
        found = advantages([2.0, 5.0, *pair, 1.0, 3.0], 2, estimator)
        assert found[2:4].tolist() == [0, 0] and found[[0, 1, 4, 5]].abs().min() > 0.1
        assert advantages(pair * 3, 2, estimator).tolist() == [0] * 6  # every group
    for pair in VARIED:
        assert advantages(pair * 3, 2, estimator).abs().min() > 0


PROMPTS = [[5, 6, 7, 8], [9], [10, 0, 12, 13, 14, 15, 16], [9, 10]]


def test_responses_to_one_prompt_are_those_to_each_alone(model, spy):  # noqa: F811
    """By the script that knows no groups. Only equal neighbours share a row."""
    ppo = load_script(path_of("ppo_llm"))
    prompts = [prompt for prompt, size in zip(PROMPTS, (1, 4, 2, 5)) for _ in range(size)]
    uniforms = noise(len(prompts), 12)
    expected = [ppo.generate(model, [p], u[None], [1, 20, 21], 1.0)[0] for p, u in zip(prompts, uniforms)]
    seen = spy(model, "forward", lambda inputs, **options: inputs.tolist())
    found = grpo.generate(model, prompts, uniforms, [1, 20, 21], 1.0)
    assert len(seen[0]) == 4 and max(len(rows) for rows in seen[1:]) >= 8  # read once, then a row for each
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.ids == theirs.ids and ours.truncated == theirs.truncated
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    assert len({tuple(x.ids) for x in found}) > 6  # every row has noise of its own
    seen.clear()
    grpo.generate(model, [[5], [5, 6], [5, 6], [6, 5], [5]], noise(5, 1), [1], 1.0)
    assert seen == [[[0, 5], [5, 6], [6, 5], [0, 5]]]


def test_a_group_shares_one_prefill_and_has_noise_of_its_own(toy_run, spy):
    calls = spy(grpo, "generate", lambda *args: args)
    toy_run(batch_size=3, group_size=4, minibatch_size=12, rollout_batch_size=5)
    prompts, uniforms = [prompt for args in calls[:3] for prompt in args[1]], torch.cat([args[2] for args in calls[:3]])
    assert [len(args[1]) for args in calls] == [5, 5, 2] * 2  # a group may be cut: its prompt is read twice
    assert [prompts[i] == prompts[i - 1] for i in range(1, 12)] == ([True] * 3 + [False]) * 2 + [True] * 3
    stream = grpo.random_stream("rollout", 1, 1)
    assert torch.equal(uniforms, torch.rand(3, 4, 10, generator=stream, dtype=torch.float64).flatten(0, 1))


CONSTANT_REWARD = """
def half(prompts, responses, answers):
    return [float(prompt in sorted(set(prompts))[:2]) * i for i, prompt in enumerate(prompts)]


def one(prompts, responses, answers):
    return [1.0] * len(prompts)
"""


def test_groups_that_score_alike_are_counted_and_teach_nothing(toy_run, tmp_path):
    (tmp_path / "constant_reward.py").write_text(CONSTANT_REWARD)
    _, (_, m) = toy_run(reward=f"{tmp_path}/constant_reward.py:half", total_iterations=1)
    assert m["group/zero_std_frac"] == 0.5  # two of four prompts
    _, (_, m) = toy_run(reward=f"{tmp_path}/constant_reward.py:one", total_iterations=1, kl_loss_coef=0.0)
    assert m["group/zero_std_frac"] == 1 and m["actor/grad_norm"] == m["advantage/std"] == 0
    _, (_, m) = toy_run(group_size=1, batch_size=8, estimator="reinforce_pp", total_iterations=1)
    assert "group/zero_std_frac" not in m and m["actor/grad_norm"] > 0


def test_refusals(toy_run):
    multiple = "--minibatch-size must be a multiple of --group-size x 1 processes that divides all responses"
    assert multiple in refusal(lambda: toy_run(minibatch_size=1))  # would split a group
    assert multiple in refusal(lambda: toy_run(batch_size=5))
    sentence = "--estimator grpo compares responses to one prompt: --group-size must be 2 or more"
    assert sentence in refusal(lambda: toy_run(group_size=1, batch_size=8))
