//! Rounding to nearest.

use rayon::prelude::*;

use crate::grid::{Grid, Level, Quantized};
use crate::pool::pool;
use crate::simd::{round_row, Isa};
use crate::solve::check_weight;
use crate::solve::levels::static_levels;
use crate::{dims, Error, Result, Watch};

/// Rows whose scales are fitted together.
const BATCH: usize = 48;

/// Rounds every weight to the nearest point of its group's grid. `weights` (one per column) weigh the scale search.
pub fn rtn(
    w: &[f32],
    rows: usize,
    dim: usize,
    grid: &Grid,
    weights: Option<&[f64]>,
    threads: usize,
    watch: &Watch,
) -> Result<Quantized> {
    grid.check()?;
    check_weight("W", w, rows, dim)?;
    if let Some(given) = weights.filter(|given| given.len() != dim) {
        return Err(Error::shape("weights_diag", dim, given.len()));
    }
    if let Some(bad) = weights.and_then(|given| given.iter().find(|v| !v.is_finite() || **v < 0.0)) {
        return Err(Error::setting("weights_diag", bad, "finite numbers of 0 or more"));
    }
    let ones = vec![1.0; dim];
    let weights = weights.unwrap_or(&ones);
    let n_groups = grid.n_groups(dim);
    let mut out = Quantized {
        codes: vec![0; dims::product("codes", rows, dim)?],
        scales: vec![0.0; rows * n_groups],
        zeros: vec![0; rows * n_groups],
    };
    watch.plan(rows as u64);
    pool(threads)?.install(|| {
        out.codes
            .par_chunks_mut(BATCH * dim)
            .zip(out.scales.par_chunks_mut(BATCH * n_groups).zip(out.zeros.par_chunks_mut(BATCH * n_groups)))
            .enumerate()
            .try_for_each(|(b, (codes, (scales, zeros)))| {
                let n = codes.len() / dim;
                let lines = &w[b * BATCH * dim..][..n * dim];
                let levels = static_levels(lines, dim, b * BATCH, grid, weights, Isa::best())?;
                levels.store(scales, zeros);
                round_rows(lines, dim, grid, (scales, zeros), codes);
                watch.advance(n as u64)
            })
    })?;
    Ok(out)
}

fn round_rows(w: &[f32], dim: usize, grid: &Grid, (scales, zeros): (&[f32], &[u8]), codes: &mut [u8]) {
    let (group, n_groups) = (grid.group(dim), grid.n_groups(dim));
    for (r, (row, codes)) in w.chunks_exact(dim).zip(codes.chunks_exact_mut(dim)).enumerate() {
        for (g, (values, codes)) in row.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let level = Level { scale: scales[r * n_groups + g], zero: zeros[r * n_groups + g] };
            round_row(Isa::best(), values, level, grid.top(), codes);
        }
    }
}
