"""The paper's sections on the page: figures with units, and a table among those of the product."""

from loopq.analysis.report import page
from loopq.analysis.report.sections import all_figures, all_tables
from tests.support.pages import check_axes


def test_every_section_is_on_the_page(diagnosis):
    pictures = all_figures(diagnosis)
    assert [p.name for p in pictures] == ["loop", "displacement", "jacobian", "bypass"]
    for picture in pictures:
        check_axes(picture)
    (table,) = all_tables(diagnosis)
    assert "output-matched noise" in table
    assert table in page.render(diagnosis)
