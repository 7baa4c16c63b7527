"""The paper's sections on the page: figures with units, and a table among those of the product."""

import pytest

from loopq.diagnose import survey
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.context import Context
from loopq.paper.scatter import gain_scatter
from loopq.report import page
from loopq.report.sections import all_figures, all_tables
from loopq.settings.execution import Execution
from tests.report.conftest import check_axes
from tests.support.looptoys import LinearLoop, LinearSystem, tokens

CONFIG = DiagnoseConfig(n_prompts=2, n_jacobian_prompts=2, seeds=(0,), n_directions=4)


@pytest.fixture(scope="module")
def found():
    return survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            CONFIG,
            execution=Execution(threads=1),
        ),
        only=["displacement", "perturbation", "jacobian", "bypass"],
    )


def test_every_section_is_on_the_page(found):
    pictures = all_figures(found)
    assert [p.name for p in pictures] == ["loop", "displacement", "jacobian", "bypass"]
    points = [{"name": "a", "gain": 7.8, "gap_closed": 1.02, "one_step_better": False}]
    for picture in [*pictures, gain_scatter(points)]:
        check_axes(picture)
    (table,) = all_tables(found)
    assert "output-matched noise" in table
    assert table in page.render(found)


def test_the_data_of_every_section_has_what_the_page_reads(found):
    wanted = {
        "displacement": {"settings", "layers"},
        "perturbation": {"norm", "locations", "rows"},
        "jacobian": {"prompts", "states", "acceptance", "settings"},
        "bypass": {"rows", "bypass_agreement", "settings"},
    }
    assert {name: set(found["sections"][name]) for name in wanted} == wanted
