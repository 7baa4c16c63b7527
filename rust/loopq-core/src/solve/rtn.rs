//! Rounding to nearest.

use rayon::prelude::*;

use crate::grid::{Grid, Level, Quantized};
use crate::pool::pool;
use crate::solve::{check_weight, located};
use crate::{Error, Result, Watch};

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
    if let Some(bad) = weights.and_then(|given| given.iter().find(|v| !v.is_finite() || **v < 0.0))
    {
        return Err(Error::setting(
            "weights_diag",
            bad,
            "finite numbers of 0 or more",
        ));
    }
    let (group, n_groups) = (grid.group(dim), grid.n_groups(dim));
    let mut out = Quantized {
        codes: vec![0; rows * dim],
        scales: vec![0.0; rows * n_groups],
        zeros: vec![0; rows * n_groups],
    };
    pool(threads)?.install(|| {
        out.codes
            .par_chunks_mut(dim)
            .zip(
                out.scales
                    .par_chunks_mut(n_groups)
                    .zip(out.zeros.par_chunks_mut(n_groups)),
            )
            .enumerate()
            .try_for_each(|(r, (codes, (scales, zeros)))| {
                watch.check()?;
                let row = &w[r * dim..(r + 1) * dim];
                for g in 0..n_groups {
                    let range = g * group..dim.min((g + 1) * group);
                    let values: Vec<f64> =
                        row[range.clone()].iter().map(|&v| f64::from(v)).collect();
                    let level = grid
                        .fit(&values, weights.map(|all| &all[range.clone()]))
                        .map_err(|e| located(e, r, g))?;
                    round_group(&values, level, grid.top(), &mut codes[range]);
                    scales[g] = level.scale;
                    zeros[g] = level.zero;
                }
                Ok(())
            })
    })?;
    Ok(out)
}

fn round_group(values: &[f64], level: Level, top: u8, codes: &mut [u8]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = level.code(value, top);
    }
}
