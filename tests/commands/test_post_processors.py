"""Scored answers, worked by hand: the best, pairs, and rewards written into prompts."""

from openrlhf.commands.infer import best_answers, preference_pairs, rewards_in_prompts
from openrlhf.datasets.chat import wish_template, wrap_input


def row(prompt: object, output: str, reward: float) -> dict:
    return {"input": prompt, "output": output, "reward": reward}


ROWS = [
    row("a", "x", 1.0),
    row("b", "y", -2.0),
    row("a", "z", 3.0),
    row("b", "v", -2.0),
    row("a", "w", 3.0),
    row("a", "u", 0.5),
]


def test_the_best_answer_of_each_prompt_stays_and_the_first_of_equals():
    assert best_answers(ROWS) == [row("a", "z", 3.0), row("b", "y", -2.0)]


def test_the_best_and_the_worst_answer_make_a_pair_and_equal_ones_are_counted():
    pairs, num_equal = preference_pairs(ROWS)
    assert pairs == [
        {
            "prompt": "a",
            "chosen": "z",
            "chosen_reward": 3.0,
            "rejected": "u",
            "rejected_reward": 0.5,
        }
    ]
    assert num_equal == 1


def test_a_pair_says_which_of_its_sides_was_cut():
    cut = {"finish_reason": "length"}
    [pair], _ = preference_pairs(
        [row("a", "x", 1.0) | cut, row("a", "y", 0.0) | {"finish_reason": "stop"}]
    )
    assert pair["chosen_finish_reason"] == "length" and "rejected_finish_reason" not in pair


def test_other_columns_stay_with_the_rows_that_are_kept_and_made():
    facts = {"id": 7, "is_rendered": True, "chosen": "of the data"}
    rows = [{**row("a", "x", 1.0), **facts}, {**row("a", "y", 0.0), **facts}]
    assert best_answers(rows) == rows[:1]
    [pair], _ = preference_pairs(rows)
    assert (pair["id"], pair["is_rendered"]) == (7, True)
    assert (pair["chosen"], pair["given_chosen"]) == ("x", "of the data")
    assert not pair.keys() & {"input", "output", "reward"}
    assert [found["id"] for found in rewards_in_prompts(rows)] == [7, 7]


def test_message_lists_that_say_the_same_are_one_prompt():
    first = [{"role": "user", "content": "hi"}]
    again = [{"content": "hi", "role": "user"}]
    rows = [row(first, "x", 1.0), row(again, "y", 2.0)]
    assert best_answers(rows) == [rows[1]]


def test_the_reward_is_written_behind_the_prompt_with_two_decimals():
    braces = "print {reward} {input} {x}"
    found = rewards_in_prompts([row("2+2=", "4", 1.234), row(braces, "3", -0.5)])
    assert [item["input"] for item in found] == [
        "2+2= <rm_score>: 1.23 ",
        f"{braces} <rm_score>: -0.50 ",
    ]
    assert [item["output"] for item in found] == ["4", "3"]


def test_z_scores_are_written_where_they_are_wanted():
    rows = [row("a", "x", 1.0), row("b", "y", 3.0)]  # mean 2, standard deviation 1
    found = rewards_in_prompts(rows, "[{reward}] {input}", normalize=True)
    assert [item["input"] for item in found] == ["[-1.00] a", "[1.00] b"]
    [equal, _] = rewards_in_prompts([rows[0], rows[0]], "[{reward}] {input}", normalize=True)
    assert equal["input"] == "[0.00] a"


def test_a_wish_stands_where_the_reward_was_written():
    [row] = rewards_in_prompts([{"input": "2+2=", "output": "4", "reward": 5.0}])
    assert wrap_input("2+2=", wish_template("<rm_score>: 5.00")) == row["input"]
    template = "[{reward}] {input}"
    [row] = rewards_in_prompts([{"input": "2+2=", "output": "4", "reward": 5.0}], template)
    assert wrap_input("2+2=", wish_template("[5.00] {input}")) == row["input"] == "[5.00] 2+2="


def test_in_a_dialogue_the_last_user_message_is_wrapped():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "bye"},
    ]
    found = wrap_input(messages, "{input}!")
    assert [message["content"] for message in found] == ["hi", "yes?", "bye!"]
    assert messages[2]["content"] == "bye"
