"""Tasks: prompts by (seed, step), disjoint splits, demonstrations, one rendering."""

import random
import re

import pytest

from mcore_rl.config.schema import TaskConfig, TaskKind
from mcore_rl.data.build import build_task
from mcore_rl.data.countdown import parse_question
from mcore_rl.data.splits import split_of
from mcore_rl.data.tokenizer import build_tokenizer, load_tokenizer, stop_token_ids
from mcore_rl.rewards.expression import reaches_target
from mcore_rl.types import Completion

TOKENIZER = build_tokenizer()
WALK = re.compile(r"\d([+-]\d){5}")


def task(seed=0, **fields):
    return build_task(TaskConfig(**fields), TOKENIZER, seed=seed)


def decode(ids):
    return TOKENIZER.decode(list(ids))


def answer(prompt, text, *, stopped=True):
    ids = TOKENIZER.encode(text, add_special_tokens=False) + ([TOKENIZER.eos_token_id] if stopped else [])
    reason = "stop" if stopped else "length"
    return Completion(prompt.prompt_id, 0, prompt.token_ids, tuple(ids), (0.0,) * len(ids), reason, 0)


def test_tokenizer_numbers():
    """302 tokens, pad 0, stop 2; a six-term question is 19 tokens, a worked answer 16, a direct one 6."""
    assert (len(TOKENIZER), TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (302, 0, 2)
    prompt = task().prompts(0, 1)[0]
    assert decode(prompt.token_ids) == f"<|im_start|>user\n{prompt.question}<|im_end|>\n<|im_start|>assistant\n"
    assert len(prompt.token_ids) == 19
    assert len(TOKENIZER.encode(r"7 5 3 2 9 \boxed{9}<|im_end|>", add_special_tokens=False)) == 16
    assert len(TOKENIZER.encode(r"\boxed{9}<|im_end|>", add_special_tokens=False)) == 6
    assert TOKENIZER.tokenize("a12") == ["a", "1", "2"]


def test_tokenizer_is_an_ordinary_folder(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab() == build_tokenizer().get_vocab()
    assert loaded.chat_template == TOKENIZER.chat_template
    assert stop_token_ids(loaded) == (2,)
    text = "any bytes: \u00e9 \u4e2d \t x"
    assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text


def test_tokenizer_errors_name_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    plain = build_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"model\.build\.tokenizer: 'gpt'"):
        build_tokenizer("gpt")


def test_prompts_depend_on_seed_and_step_alone():
    first, again = task(seed=3), task(seed=3)
    again.prompts(0, 5)
    again.demonstrations(7, 3)
    assert first.prompts(7, 20) == again.prompts(7, 20)
    assert [p.prompt_id for p in first.prompts(7, 2)] == ["s7-p0", "s7-p1"]
    questions = {tuple(p.question for p in task(seed=s).prompts(step, 20)) for s in (3, 4) for step in (7, 8)}
    assert len(questions) == 4


@pytest.mark.parametrize("kind", [TaskKind.arithmetic, TaskKind.countdown])
def test_splits_are_disjoint_and_evaluation_is_distinct(kind):
    made = task(kind=kind)
    test, val = ({p.question for p in made.eval_prompts(split, 300)} for split in ("test", "val"))
    assert len(test) == len(val) == 300
    trained = {p.question for step in range(20) for p in made.prompts(step, 32)}
    trained |= {p.question for step in range(20) for p, _ in made.demonstrations(step, 32)}
    assert not (trained & test or trained & val or test & val)
    assert {split_of(q) for q in trained} == {"train"}
    assert task(seed=9, kind=kind).eval_prompts("test", 10) == made.eval_prompts("test", 300)[:10]
    with pytest.raises(ValueError, match="'train'"):
        made.eval_prompts("train", 1)


@pytest.mark.parametrize(
    ("question", "digest", "split"),
    [
        ("a", 0x0CC175B9C0F1B6A831C399E269772661, "train"),
        ("abc", 0x900150983CD24FB0D6963F7D28E17F72, "test"),
        ("1", 0xC4CA4238A0B923820DCC509A6F75849B, "val"),
        ("message digest", 0xF96B697D7CB7938D525A2F31AAF161D0, "test"),
    ],
)
def test_split_is_md5_modulo_ten(question, digest, split):
    """Well-known MD5 digests (RFC 1321)."""
    assert {0: "test", 1: "val"}.get(digest % 10, "train") == split == split_of(question)


def test_walks_stay_in_one_digit():
    for prompt in task().prompts(0, 200):
        assert WALK.fullmatch(prompt.question)
        terms = [int(term) for term in re.findall(r"[+-]?\d", prompt.question)]
        totals = [sum(terms[: i + 1]) for i in range(len(terms))]
        assert all(0 <= total <= 9 for total in totals)
        assert prompt.answer == str(totals[-1])


def test_demonstrations_follow_the_schedule():
    made = task(worked_only_steps=2, worked_share=0.35)
    for prompt, ids in made.demonstrations(1, 100):
        terms = [int(term) for term in re.findall(r"[+-]?\d", prompt.question)]
        totals = " ".join(str(sum(terms[: i + 1])) for i in range(1, len(terms)))
        assert decode(ids) == f"{totals} \\boxed{{{prompt.answer}}}<|im_end|>"
    later = [decode(ids) for step in range(2, 22) for _, ids in made.demonstrations(step, 50)]
    share = sum(not text.startswith("\\") for text in later) / len(later)
    assert abs(share - 0.35) < 0.06  # four standard deviations at n = 1000
    assert made.demonstrations(3, 4) == task(worked_only_steps=2, worked_share=0.35).demonstrations(3, 4)


@pytest.mark.parametrize("kind", [TaskKind.arithmetic, TaskKind.countdown])
@pytest.mark.parametrize("pattern", ["boxed", "hash", "solution"])
def test_demonstrations_earn_the_reward(kind, pattern):
    made = task(kind=kind, answer_pattern=pattern, worked_only_steps=1)
    for step in (0, 1):
        for prompt, ids in made.demonstrations(step, 30):
            score = made.score(prompt, Completion(prompt.prompt_id, 0, prompt.token_ids, ids, (0.0,) * len(ids), "stop", 0))
            assert (score.reward, score.correct, score.format_ok, score.truncated) == (1.0, True, True, False), decode(ids)


def test_countdown_questions_are_solvable():
    made = task(kind=TaskKind.countdown, numbers=4, max_number=9)
    for prompt, ids in made.demonstrations(0, 50):
        numbers, target = parse_question(prompt.question)
        assert len(numbers) == 4 and all(1 <= n <= 9 for n in numbers) and prompt.answer == str(target)
        expression = decode(ids).rpartition("\\boxed{")[2].removesuffix("}<|im_end|>")
        assert reaches_target(expression, numbers, target)


def test_scores_of_completions():
    made = task()
    prompt = made.prompts(0, 1)[0]
    right, wrong = prompt.answer, str((int(prompt.answer) + 1) % 10)
    assert made.score(prompt, answer(prompt, f"\\boxed{{{right}}}")).reward == 1.0
    assert made.score(prompt, answer(prompt, f"\\boxed{{{wrong}}}")).reward == 0.0
    assert made.score(prompt, answer(prompt, f"\\boxed{{{right}}}", stopped=False)).truncated
    assert not made.score(prompt, answer(prompt, right)).format_ok


@pytest.mark.parametrize(("ids", "reason"), [((), "stop"), ((20, 20), "stop"), ((20, 2), "length"), ((20, 2), "abort")])
def test_a_completion_that_contradicts_itself_is_named(ids, reason):
    made = task()
    prompt = made.prompts(0, 1)[0]
    with pytest.raises(ValueError, match="s0-p0/4"):
        made.score(prompt, Completion("s0-p0", 4, prompt.token_ids, ids, (0.0,) * len(ids), reason, 0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_terms": 1}, "task.min_terms=1"),
        ({"min_terms": 7}, "task.max_terms=6"),
        ({"worked_share": 1.5}, "task.worked_share=1.5"),
        ({"max_terms": 100_000}, "task.max_terms=100000: at most 1,000"),
        ({"kind": TaskKind.countdown, "numbers": 1}, "task.numbers=1"),
        ({"kind": TaskKind.countdown, "numbers": 50}, "task.numbers=50, task.max_number=20: at most 8 and 999"),
        ({"kind": TaskKind.countdown, "max_number": 10**9}, "task.max_number=1000000000: at most 8 and 999"),
        ({"kind": TaskKind.file}, "task.train_file is not set"),
        ({"answer_pattern": "last_number"}, "task.answer_pattern: 'last_number'"),
    ],
)
def test_impossible_tasks_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        task(**fields)


def test_too_few_questions_is_an_error():
    with pytest.raises(ValueError, match="no prompts left"):
        task(min_terms=2, max_terms=2).eval_prompts("test", 500)


def test_suffix_system_prompt_and_template_arguments():
    config = TaskConfig(system_prompt="Be brief.", prompt_suffix=" = ?")
    made = build_task(config, TOKENIZER, seed=0, template_kwargs={"unused": 1})
    prompt = made.prompts(0, 1)[0]
    turns = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt.question} = ?<|im_end|>\n<|im_start|>assistant\n"
    assert decode(prompt.token_ids) == turns


THINKING = (
    "<|endoftext|>{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking "
    "is false %}0{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("kwargs", "tail"), [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "0")])
def test_every_prompt_is_rendered_the_same_way_with_one_start_token(kwargs, tail):
    """A template that writes its own start token, and a switch: training, evaluation, demonstrations and probe agree."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = THINKING
    made = build_task(TaskConfig(), tokenizer, seed=0, template_kwargs=kwargs)
    prompts = made.prompts(0, 2) + made.eval_prompts("test", 2) + made.probe_prompts(0, 2)
    prompts += [prompt for prompt, _ in made.demonstrations(0, 2)]
    for prompt in prompts:
        text = f"<|endoftext|><|im_start|>user\n{prompt.question}<|im_end|>\n<|im_start|>assistant\n{tail}"
        assert decode(prompt.token_ids) == text
        assert prompt.token_ids.count(tokenizer.pad_token_id) == 1  # <|endoftext|>, id 0, once


def test_generators_use_their_own_randomness():
    made = task()
    state = random.getstate()
    made.prompts(0, 4)
    assert random.getstate() == state
