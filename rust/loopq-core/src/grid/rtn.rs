//! Round to nearest: every weight on its own, to the nearest point of its group's grid.

use rayon::prelude::*;

use crate::grid::{by_steps, Grid, GroupScale, GroupScales, Quantized, Steps};
use crate::memory::collected;
use crate::simd::{per_isa, Isa};
use crate::weight::Weight;
use crate::{Execution, Result};

/// Rows in one batch of the scale search.
const BATCH: usize = 48;

/// Rounds every weight to the nearest point of its group's grid; half to even.
pub fn rtn(w: Weight<'_>, grid: &Grid, execution: &Execution<'_>) -> Result<Quantized> {
    grid.check_plain()?;
    let (rows, dim) = (w.rows(), w.dim());
    let n_groups = grid.n_groups(dim);
    let even: Vec<f64> = collected("weights of the scale search", (0..dim).map(|_| 1.0))?;
    let mut out = Quantized::zeroed(rows, dim, grid)?;
    execution.pool()?.install(|| {
        out.codes
            .par_chunks_mut(BATCH * dim)
            .zip(out.scales.par_chunks_mut(BATCH * n_groups))
            .enumerate()
            .try_for_each(|(b, (codes, scales))| {
                execution.check()?;
                let batch = w.slice(b * BATCH, codes.len() / dim);
                GroupScales::fitted(batch, b * BATCH, grid, &even, Isa::best())?.store(scales);
                round_rows(batch, grid, scales, codes);
                Ok(())
            })
    })?;
    Ok(out)
}

fn round_rows(w: Weight<'_>, grid: &Grid, scales: &[GroupScale], codes: &mut [u8]) {
    let dim = w.dim();
    let (group, n_groups, rounding) = (grid.group(dim), grid.n_groups(dim), grid.rounding());
    for (r, (row, codes)) in w.values().chunks_exact(dim).zip(codes.chunks_exact_mut(dim)).enumerate() {
        for (g, (values, codes)) in row.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let one = &scales[r * n_groups + g];
            by_steps!(&rounding, |steps| round_row(Isa::best(), values, one, steps, codes));
        }
    }
}

/// 2^52: adding it to a whole number below puts that number in the low bits.
const WHOLE: f64 = 4_503_599_627_370_496.0;

per_isa! {
    fn round_row<S: Steps>(values: &[f32], one: &GroupScale, steps: S, codes: &mut [u8]) = round_body;
}

#[inline(always)]
fn round_body<S: Steps>(values: &[f32], one: &GroupScale, steps: S, codes: &mut [u8]) {
    let (scale, zero, offset) = (f64::from(one.scale), f64::from(one.zero), f64::from(one.offset));
    for (code, &v) in codes.iter_mut().zip(values) {
        *code = (steps.code((f64::from(v) - offset) / scale, zero) + WHOLE).to_bits() as u8;
    }
}
