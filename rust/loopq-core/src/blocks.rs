//! A weight with rows coupled in consecutive blocks; each block is solved on its own.

use rayon::prelude::*;

use crate::factor::DampedHessian;
use crate::grid::Quantized;
use crate::memory::{collected, extend, gathered, reserve};
use crate::weight::Weight;
use crate::{Error, Execution, Result};

/// Solves each block: `left` are the metrics of consecutive blocks of rows, and `solve` is given a block's rows and its
/// metric. Gives the blocks' codes one after another, and what `solve` says besides. An error names the row of `W`.
pub(crate) fn in_blocks<R: Send>(
    w: Weight<'_>,
    left: &[DampedHessian<'_>],
    execution: &Execution<'_>,
    solve: impl Fn(Weight<'_>, &DampedHessian<'_>) -> Result<(Quantized, R)> + Sync,
) -> Result<(Quantized, Vec<R>)> {
    let covered: usize = left.iter().map(|l| l.factor().dim()).sum();
    if covered != w.rows() {
        return Err(Error::shape("A", w.rows(), covered));
    }
    let mut next = 0;
    let starts = left.iter().map(|l| {
        next += l.factor().dim();
        next - l.factor().dim()
    });
    let starts = collected("blocks of rows", starts)?;
    let solved = execution.pool()?.install(|| {
        let run = |(&from, l): (&usize, &DampedHessian<'_>)| {
            solve(w.slice(from, l.factor().dim()), l).map_err(|e| e.moved(|row| from + row))
        };
        gathered("blocks of rows", starts.par_iter().zip(left).map(run))
    })?;
    let mut out = Quantized { codes: Vec::new(), scales: Vec::new() };
    let mut reports = Vec::new();
    reserve("blocks of rows", &mut reports, left.len())?;
    for part in solved {
        let (part, report) = part?;
        extend("codes", &mut out.codes, &part.codes)?;
        extend("scales", &mut out.scales, &part.scales)?;
        reports.push(report);
    }
    Ok((out, reports))
}
