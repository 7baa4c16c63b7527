//! Static scales of least weighted error, with either sign.
//!
//! A symmetric grid has one code more below zero than above. A negative scale turns it round at no cost in bytes, which
//! matters at two and three bits; `signed` tries both.

use crate::grid::{Grid, Level, Search, SHRINK_STEPS};
use crate::{Error, Result};

/// How the error of a column counts in the scale search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// No search: the largest magnitude sets the scale.
    Largest,
    /// Every column alike.
    Even,
    /// By the diagonal of `S`: what an error costs that nothing makes up for.
    Diagonal,
    /// By `1 / [S^-1]_jj`: what it costs when all other columns do.
    Conditional,
}

impl Cost {
    /// The weighting with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "largest" => Ok(Self::Largest),
            "even" => Ok(Self::Even),
            "diagonal" => Ok(Self::Diagonal),
            "conditional" => Ok(Self::Conditional),
            _ => Err(Error::setting(
                "scale_cost",
                format!("{name:?}"),
                "'largest', 'even', 'diagonal', 'conditional'",
            )),
        }
    }
}

/// Fits one group. Scales that the stored type cannot hold are left out; that it can hold none is an error.
pub(crate) fn fit(grid: &Grid, signed: bool, values: &[f64], cost: &[f64]) -> Result<Level> {
    let low = values.iter().copied().fold(0.0, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    if low == 0.0 && high == 0.0 {
        let zero = if grid.symmetric { grid.middle() } else { 0 };
        return Ok(Level { scale: 1.0, zero });
    }
    let mut best: Option<(f64, Level)> = None;
    let signs: &[f32] = if signed && grid.symmetric { &[1.0, -1.0] } else { &[1.0] };
    for &sign in signs {
        let (lo, hi) = if sign > 0.0 { (low, high) } else { (-high, -low) };
        let exact = widest(grid, signed, lo, hi);
        let steps = match grid.search {
            Search::Max => 1,
            Search::Mse => SHRINK_STEPS,
        };
        for k in 0..steps {
            let shrink = 1.0 - k as f64 / 100.0;
            let scale = grid.scale_type.round(exact * shrink);
            if scale == 0.0 || !scale.is_finite() {
                continue;
            }
            let zero = if grid.symmetric {
                grid.middle()
            } else {
                (-lo * shrink / f64::from(scale)).round_ties_even().clamp(0.0, f64::from(grid.top())) as u8
            };
            let level = Level { scale: scale * sign, zero };
            let error = error_of(level, grid.top(), values, cost);
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, level));
            }
        }
    }
    best.map(|(_, level)| level).ok_or_else(|| Error::ScaleRange {
        row: 0,
        group: 0,
        value: widest(grid, signed, low, high),
        what: if high.max(-low) < 1.0 { "zero" } else { "infinite" },
        dtype: grid.scale_type.name(),
    })
}

/// The scale at which nothing is clipped. Without signs it is the published one, which leaves the lowest code unused.
fn widest(grid: &Grid, signed: bool, low: f64, high: f64) -> f64 {
    let above = f64::from(grid.middle() - 1);
    if !grid.symmetric {
        (high - low) / f64::from(grid.top())
    } else if signed {
        (high / above).max(-low / f64::from(grid.middle()))
    } else {
        high.max(-low) / above
    }
}

fn error_of(level: Level, top: u8, values: &[f64], cost: &[f64]) -> f64 {
    values
        .iter()
        .zip(cost)
        .map(|(&v, &c)| {
            let d = v - f64::from(level.value(level.code(v, top)));
            c * d * d
        })
        .sum()
}
