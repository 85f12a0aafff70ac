"""User files load as modules of their own, and what is wrong with them is said in one line."""

import pytest

from openrlhf.errors import ConfigError
from openrlhf.utils.user_code import import_function, in_words, load_module


def test_two_files_of_the_same_name_do_not_collide(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agent.py").write_text(f"NAME = {folder!r}\n")
    first = load_module(tmp_path / "one" / "agent.py")
    second = load_module(tmp_path / "two" / "agent.py")
    assert (first.NAME, second.NAME) == ("one", "two")


def test_a_file_imports_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_agent.py").write_text("VALUE = 7\n")
    (tmp_path / "agent.py").write_text("from neighbour_of_agent import VALUE\n")
    assert load_module(tmp_path / "agent.py").VALUE == 7


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a Python file that exists"):
        load_module(tmp_path / "absent.py")


@pytest.mark.parametrize(
    ("line", "error"), [("y = 1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError")]
)
def test_a_file_that_does_not_run_is_an_error_with_its_line(tmp_path, line, error):
    file = tmp_path / "broken.py"
    file.write_text(f"x = 1\n{line}\n")
    with pytest.raises(ConfigError, match=f"broken.py:2: {error}"):
        load_module(file)


def test_a_module_that_does_not_run_is_an_error_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_metric.py").write_text("\nx = undefined\n")
    with pytest.raises(ConfigError, match=r"broken_metric.py:2: NameError"):
        import_function("broken_metric:score")
    with pytest.raises(ConfigError, match="no module nowhere_at_all"):
        import_function("nowhere_at_all:score")


def test_a_missing_attribute_lists_what_was_found(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("import os\ndef one(): ...\nclass Two: ...\n_hidden = 1\n")
    with pytest.raises(ConfigError, match=r"has no loss; found: one, Two. Define"):
        import_function(f"{file}:loss")


def test_an_exception_is_one_line_that_is_not_too_long():
    assert in_words(ValueError("one\n  two")) == "ValueError: one two"
    assert in_words(KeyError()) == "KeyError"
    assert len(in_words(ValueError("x" * 10**6))) < 600
