"""The table of mutants fits the code: `python -m tests.mutants` runs them."""

import ast

import pytest

from tests.checkout import ROOT
from tests.mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{each.file}: {each.why}" for each in MUTANTS])
def test_a_mutant_is_one_change_of_the_code_that_a_test_stands_for(mutant: Mutant):
    """Its text is there once, what becomes of it is Python, and its test is where it says."""
    code = (ROOT / mutant.file).read_text(encoding="utf-8")
    path, _, test = mutant.test.partition("::")

    assert code.count(mutant.old) == 1
    assert ast.dump(ast.parse(code.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(code))
    assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
