import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"


def test_the_examples_of_the_page_give_what_they_show():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 10
    assert not failed
