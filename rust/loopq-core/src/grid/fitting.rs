//! Levels fitted to a weight: scales, codes and levels in turn, each the best one given the others.

use crate::grid::table::MOST;
use crate::grid::{Grid, GroupScales, Table, Values};
use crate::memory::{copied, zeros};
use crate::simd::Isa;
use crate::weight::Weight;
use crate::{dims, Execution, Result};

/// Rows that levels are fitted on, spread evenly over the weight: some thousand weights for every level.
const ROWS: usize = 64;
/// Most turns.
const TURNS: usize = 8;

/// The table of least square error for a weight, errors of columns weighted; it starts from the grid's own.
///
/// With scales `d` and weights `w` of level `k`, `L_k = sum h d w / sum h d^2`. A level without a weight stays.
pub fn fitted(w: Weight<'_>, weights: &[f64], grid: &Grid, execution: &Execution<'_>) -> Result<Table> {
    grid.check_plain()?;
    let dim = w.dim();
    dims::check_matrix("weights of the columns", weights, 1, dim)?;
    let mut table = *grid.on_table()?;
    let mut values: Vec<f32> = zeros("rows that levels are fitted on", ROWS.min(w.rows()) * dim)?;
    let n = values.len() / dim;
    for (i, row) in values.chunks_exact_mut(dim).enumerate() {
        row.copy_from_slice(&w.values()[i * w.rows() / n * dim..][..dim]);
    }
    let sample = Weight::new("W", &values, n, dim)?;
    for _ in 0..TURNS {
        execution.check()?;
        let next = improved(sample, weights, &Grid { values: Values::Table(table), ..*grid })?;
        if next == table {
            break;
        }
        table = next;
    }
    Ok(table)
}

fn improved(w: Weight<'_>, weights: &[f64], grid: &Grid) -> Result<Table> {
    let (dim, group, rounding, table) = (w.dim(), grid.group(w.dim()), grid.rounding(), grid.on_table()?);
    let scales = GroupScales::fitted(w, 0, grid, weights, Isa::best())?;
    let mut sums = [(0.0, 0.0); 16];
    for (r, row) in w.values().chunks_exact(dim).enumerate() {
        for (j, &value) in row.iter().enumerate() {
            let scale = f64::from(scales.lanes(j / group, r, 1).0[0]);
            let value = f64::from(value);
            let (above, below) = &mut sums[usize::from(rounding.code(value / scale, 0.0)) % 16];
            *above += weights[j] * scale * value;
            *below += weights[j] * scale * scale;
        }
    }
    let mut wanted: Vec<f64> = copied("levels", &sums.map(|(above, below)| above / below)[..table.len()])?;
    for (k, level) in wanted.iter_mut().enumerate() {
        if !level.is_finite() {
            *level = f64::from(table.level(k as u8));
        }
    }
    let most = wanted.iter().fold(0.0_f64, |most, level| most.max(level.abs()));
    let mut bytes = [0; 16];
    for (byte, level) in bytes.iter_mut().zip(&wanted) {
        *byte = (level / most * f64::from(MOST)).round_ties_even() as i8;
    }
    // Two levels that round to one number would be one level.
    for k in 1..wanted.len() {
        bytes[k] = bytes[k].max(bytes[k - 1].saturating_add(1));
    }
    Table::new(&bytes[..wanted.len()])
}
