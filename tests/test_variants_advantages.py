"""maxrl, optimal_baseline, mask_truncated, self_distill: each does what its head says."""

import itertools
import math

import pytest
import torch
from conftest import make_tokenizer, refusal, untimed
from test_variants import SOME_END, folder, gradients_of, grpo, losses_of, train, variant  # noqa: F401

# ruff: noqa: F811

F = torch.float64


def all_groups(num_answers, group_size, probabilities):
    """Every group that can be drawn (M,G), and how probable each is (M,)."""
    groups = torch.tensor(list(itertools.product(range(num_answers), repeat=group_size)))
    return groups, probabilities[groups].prod(1)


# --- maxrl


def four_answers(theta):
    """A language model of four answers, x, y, za, zb: log-probs of their tokens (4,2) under 5 logits, and the mask."""
    first, second = theta[:3].log_softmax(0), theta[3:].log_softmax(0)
    nothing = torch.zeros(2, dtype=F)
    logprobs = torch.stack([torch.cat([first[:2], first[2:].expand(2)]), torch.cat([nothing, second])], 1)
    return logprobs, torch.tensor([[True, False], [True, False], [True, True], [True, True]])


def mean_gradient(algo, theta, right, group_size, estimator, loss_agg):
    """What the script's loss has for a gradient in the mean, over all groups that can be drawn. Uphill."""
    logprobs, mask = four_answers(theta)
    groups, weights = all_groups(4, group_size, logprobs.sum(1).exp().detach())
    advantages = algo.group_advantages(right[groups].flatten(), group_size, estimator).view(groups.shape)
    advantages = (weights[:, None] * len(groups) * advantages).flatten()[:, None]  # the loss averages over the groups
    rows = groups.flatten()
    losses, _ = losses_of(algo, logprobs[rows], logprobs[rows].detach(), advantages.expand(-1, 2))
    loss = algo.aggregate(losses, mask[rows], loss_agg, int(mask[rows].sum()), len(rows), 1)
    return -torch.autograd.grad(loss, theta)[0]


@pytest.mark.parametrize("easy", [-2.0, 0.5, 3.0])
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_maxrl_climbs_the_truncated_log_likelihood(variant, group_size, easy):
    """2602.02710, eq. 6: the log of the chance of success as a series, here up to G - 1 terms; REINFORCE has one."""
    algo = variant("maxrl")
    args = algo.Args(model="m")
    theta = torch.tensor([0.3, easy, -0.4, 0.8, -0.2], dtype=F, requires_grad=True)
    right = torch.tensor([0, 1, 0, 1], dtype=F)  # y and zb
    chance = four_answers(theta)[0].sum(1).exp() @ right
    series = -sum((1 - chance) ** k / k for k in range(1, group_size))
    (expected,) = torch.autograd.grad(series, theta, retain_graph=True)
    found = mean_gradient(algo, theta, right, group_size, args.estimator, args.loss_agg)
    assert torch.allclose(found, expected, atol=1e-7) and expected.abs().max() > 1e-3
    (slope,) = torch.autograd.grad(chance, theta)
    plain = mean_gradient(algo, theta, right, group_size, "dr_grpo", args.loss_agg)
    assert torch.allclose(plain, (group_size - 1) / group_size * slope)
    # The average over tokens first, the script's own default, would favour short answers and climb neither.
    other = mean_gradient(algo, theta, right, group_size, args.estimator, grpo.Args(model="m").loss_agg)
    assert torch.cosine_similarity(other, slope, 0) < 0.999 < torch.cosine_similarity(found, slope, 0)


def test_maxrl_by_hand(variant, train):
    algo = variant("maxrl")
    scores = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1])  # the rarer a success, the more it counts
    found = algo.group_advantages(scores, 4, "maxrl").view(4, 4)
    by_hand = torch.tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(found, by_hand)
    for estimator in "grpo", "dr_grpo", "rloo":
        assert torch.equal(algo.group_advantages(scores, 4, estimator), grpo.group_advantages(scores, 4, estimator))
    said = refusal(lambda: train("maxrl", reward="binary", kl_reward_coef=1.0, lr=1e-2))
    assert "no score may be negative" in said


# --- optimal_baseline


def answers_of_all_lengths():
    """Answers of one to three tokens a or b: probability (n,), length (n,), last token (n,), and the gradient of each
    log-prob (n,3), whose square is the length, up to a factor: the tokens of each place have a logit of their own."""
    answers = [tokens for length in (1, 2, 3) for tokens in itertools.product((0, 1), repeat=length)]
    lengths = torch.tensor([len(tokens) for tokens in answers])
    probabilities = torch.tensor([0.5, 0.25, 0.25], dtype=F)[lengths - 1] / 2**lengths
    slopes = torch.tensor([[x - 0.5 for x in tokens] + [0.0] * (3 - len(tokens)) for tokens in answers], dtype=F)
    return probabilities, lengths, torch.tensor([tokens[-1] for tokens in answers], dtype=F), slopes


@pytest.mark.parametrize("scored", [1, 2, 3])  # a last token b is right in answers of at most so many tokens
@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_baseline_of_opo_has_less_variance(variant, group_size, scored):
    algo = variant("optimal_baseline")
    probabilities, lengths, scores, slopes = answers_of_all_lengths()
    scores = scores * (lengths <= scored)
    groups, weights = all_groups(len(scores), group_size, probabilities)
    means, noise = {}, {}
    for estimator in "opo", "dr_grpo":
        of_all = scores[groups].flatten(), group_size, estimator, lengths[groups].flatten()
        gradients = (algo.group_advantages(*of_all).view(groups.shape)[..., None] * slopes[groups]).mean(1)
        means[estimator] = weights @ gradients
        noise[estimator] = (weights @ (gradients - means[estimator]).square()).sum().item()
    assert noise["opo"] < 0.9 * noise["dr_grpo"]
    assert noise["opo"] / means["opo"].square().sum() < 0.9 * noise["dr_grpo"] / means["dr_grpo"].square().sum()
    true = (probabilities * scores) @ slopes
    assert torch.allclose(means["dr_grpo"], true * (group_size - 1) / group_size)
    # The score of a response is in its own baseline, by its length: the mean gradient turns a little.
    assert torch.cosine_similarity(means["opo"], true, 0) > {2: 0.98, 3: 0.99}[group_size]


def test_opo_by_hand(variant, train, spy):
    algo = variant("optimal_baseline")
    scores, lengths = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.tensor([1, 3, 2, 2, 5, 5])
    found = algo.group_advantages(scores, 2, "opo", lengths)
    assert torch.allclose(found, torch.tensor([0.75, -0.25, -0.5, 0.5, 0.5, -0.5]))
    assert torch.equal(found[2:], algo.group_advantages(scores, 2, "dr_grpo", lengths)[2:])  # as lengths are equal
    assert algo.group_advantages(torch.full((2,), 0.1), 2, "opo", lengths[:2]).tolist() == [0, 0]
    calls = spy(algo, "group_advantages")
    metrics = train("optimal_baseline", minibatch_size=16, **SOME_END)
    for m, ((_, size, estimator, lengths), advantages) in zip(metrics[1:], calls, strict=True):
        assert (size, estimator) == (4, "opo") and lengths.float().mean().item() == m["response/length_mean"] < 32
        tokens = (lengths * advantages).view(-1, 4)
        # Over the tokens of a group they are 0 in the mean.
        assert tokens.sum(1).abs().max() < 1e-5 < tokens.abs().max()
        assert m["advantage/mean"] == pytest.approx(0, abs=1e-6)


# --- mask_truncated


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_what_was_cut_off_trains_nothing(variant, train, spy, loss_agg):
    """The gradient is that of the finished responses alone; the scores of all are in the mean and std of a group."""
    algo = variant("mask_truncated")
    batches, groups = spy(algo, "to_batch"), spy(algo, "group_advantages")
    policies, steps = spy(algo, "Policy"), spy(torch.optim.AdamW, "step", gradients_of)
    flags = {"loss_agg": loss_agg, "entropy_coef": 0.1, "kl_loss_coef": 0.3, "max_grad_norm": 0.0, "lr": 0.0} | SOME_END
    (metrics,) = train("mask_truncated", **flags, total_iterations=1, minibatch_size=16)[1:]
    (((_, responses, _), (tokens, mask, *_)),) = batches
    ((((scores, *_), advantages),)) = groups
    finished = torch.tensor([not response.truncated for response in responses])
    assert 4 < finished.sum() < 12 and metrics["response/truncated_frac"] == 1 - finished.float().mean()
    assert torch.allclose(advantages, grpo.group_advantages(scores, 4, "grpo"))  # of all sixteen
    _, policy = policies[0]  # of the reference, which has the same weights, or of the policy: lr is 0
    policy.requires_grad_(True).zero_grad()
    logprobs, entropy = policy(tokens[finished], mask[finished])  # without the rows that were cut off
    losses = -advantages[finished][:, None] * (logprobs - logprobs.detach()).exp() - 0.1 * entropy
    loss = grpo.aggregate(losses, mask[finished], loss_agg, int(mask[finished].sum()), int(finished.sum()), 32)
    loss.backward()
    found = torch.cat([gradient.flatten() for gradient in steps[0]])
    by_hand = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert torch.allclose(found, by_hand, atol=1e-5 * by_hand.abs().max().item())
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4)
    used = (advantages * finished)[:, None].expand_as(mask)[mask]
    assert metrics["advantage/mean"] == pytest.approx(used.mean().item(), abs=1e-6) != advantages.mean().item()


def test_nothing_cut_off_is_grpo_and_all_cut_off_takes_no_step(variant, train, monkeypatch, spy):
    algo, real = variant("mask_truncated"), variant("mask_truncated").generate

    def end(algo, truncated):
        responses = lambda *args: [r._replace(truncated=truncated) for r in real(*args)]  # noqa: E731
        monkeypatch.setattr(algo, "generate", responses)

    end(algo, truncated=False)
    finished = train("mask_truncated")
    end(grpo, truncated=False)
    assert untimed(finished) == untimed(train("mask_truncated", on=grpo.__file__))
    end(algo, truncated=True)
    steps = spy(torch.optim.AdamW, "step", gradients_of)
    metrics = train("mask_truncated", kl_reward_coef=0.1, entropy_coef=0.1)
    assert len(steps) == 6 and not any(gradient.any() for step in steps for gradient in step)
    for m in metrics[1:]:
        assert all(map(math.isfinite, m.values())) and m["response/truncated_frac"] == 1
        assert m["actor/loss"] == 0 and m["actor/approx_kl"] < 1e-9 and m["actor/entropy"] > 0


# --- self_distill


def test_who_is_shown_which_solution(variant):
    """Another one of the group; a group without a success has none, and the only success none for itself."""
    find = variant("self_distill").find_solutions
    scores = [1.0, 0, 0.5, 0, 0, 0, 0, 1, 0]
    results = [{"score": score, "response": text} for score, text in zip(scores, "abcdefghi")]
    assert find(results, 3, 0.5) == ["c", "a", "a", None, None, None, "h", None, "h"]


def test_the_teachers_prompt_by_a_template(variant, tmp_path):
    """The solution is in the user's turn."""
    algo, tokenizer = variant("self_distill"), make_tokenizer()
    args = algo.Args(model="m")
    args.reward, args.max_prompt_length = "file.py:other", 50
    table = algo.datasets.Dataset.from_list([{"question": "what is a", "answer": "1"}])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}-{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant-{% endif %}"
    )
    ((row,), _) = algo.load_prompts("d", table, args, tokenizer)
    text = tokenizer.decode(algo.ask_again(row, "bcd", tokenizer, args))
    assert text.startswith("user-what is a\n") and "\n\nbcd\n\n" in text
    # The tests' tokenizer has no capitals.
    assert text.endswith("orrectly solve the original question.<eos>assistant-")


def test_the_self_teacher_rates_the_students_own_tokens(variant, train, folder, spy):
    """Advantages against a pass of its own for each row, with the prompt written out; 0 without a solution."""
    algo = variant("self_distill")
    batches, used, policies = spy(algo, "to_batch"), spy(algo, "policy_loss"), spy(algo, "Policy")
    (m,) = train("self_distill", reward="binary", total_iterations=1, lr=0.0, max_response_length=8)[1:]
    ((rows, responses, _), (_, mask, *_)), ((hinted, _, _), _) = batches
    _, policy = policies[0]
    tokenizer = algo.AutoTokenizer.from_pretrained(folder / "model")
    texts = tokenizer.batch_decode([r.ids for r in responses], skip_special_tokens=True)
    right = [bool(text) and text[0] < "5" for text in texts]
    logprobs = []
    for row in rows, hinted:
        alone = []
        for r, response in zip(row, responses):
            tokens = torch.tensor([r["input_ids"] + response.ids])
            actions = torch.arange(tokens.shape[1])[None] >= len(r["input_ids"]) - 1
            actions[0, -1] = False
            alone.append(policy(tokens, actions)[0][actions].detach())
        logprobs.append(alone)
    (_, _, advantages, *_), _ = used[-1]  # the last call is for the log, with the whole batch
    taught, gaps = 0, []
    for b, (student, teacher) in enumerate(zip(*logprobs)):
        group = [j for j in range(b - b % 4, b - b % 4 + 4) if j != b and right[j]]
        found = advantages[b][mask[b]]
        if group:
            request = f"\nCorrect solution:\n\n{texts[group[0]]}\n\nCorrectly solve the original question."
            asked = rows[b]["input_ids"] + tokenizer(request, add_special_tokens=False)["input_ids"]
            assert hinted[b]["input_ids"] == asked
            assert torch.allclose(found, teacher - student, atol=1e-4) and found.abs().max() > 0.01
            taught += 1
            gaps.append(student - teacher)
        else:
            assert hinted[b] is rows[b] and found.abs().max() == 0
    assert 0 < taught < 16 and m["teacher/taught_frac"] == taught / 16
    assert m["teacher/kl"] == pytest.approx(torch.cat(gaps).mean().item(), abs=1e-4)
