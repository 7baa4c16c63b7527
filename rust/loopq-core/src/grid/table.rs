//! Levels of a table: values of codes that are not evenly spaced. Format: `docs/formats/levels.md`.

use crate::grid::steps::Steps;
use crate::{Error, Result};

/// A level is a whole number of these parts of a scale, so that products with levels are products of signed bytes.
pub const PARTS: f32 = 16.0;

/// The largest level.
pub(crate) const MOST: i8 = 127;
/// Codes of a table.
const LEVELS: usize = 16;

/// Ascending levels, some below and some above zero, in sixteenths of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    levels: [i8; LEVELS],
    len: usize,
}

impl Table {
    /// A table of up to 16 levels from -127 to 127.
    pub fn new(levels: &[i8]) -> Result<Self> {
        let fits = (2..=LEVELS).contains(&levels.len()) && levels.iter().all(|&l| l > i8::MIN);
        let ends = levels.first().is_some_and(|&l| l < 0) && levels.last().is_some_and(|&l| l > 0);
        if !(fits && ends && levels.is_sorted_by(|a, b| a < b)) {
            let allowed = "2 to 16 ascending whole numbers from -127 to 127, of both signs";
            return Err(Error::setting("levels", format!("{levels:?}"), allowed));
        }
        let mut table = Self { levels: [0; LEVELS], len: levels.len() };
        table.levels[..levels.len()].copy_from_slice(levels);
        Ok(table)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a table has two levels at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All levels in sixteenths, zeros behind the last.
    #[must_use]
    pub fn bytes(&self) -> &[i8; LEVELS] {
        &self.levels
    }

    /// The level of a biased code, in scales.
    #[inline(always)]
    #[must_use]
    pub fn level(&self, code: u8) -> f32 {
        f32::from(self.levels[usize::from(code) % LEVELS]) / PARTS
    }

    /// The lowest and the highest level.
    pub(crate) fn ends(&self) -> (f64, f64) {
        (f64::from(self.level(0)), f64::from(self.level(self.len as u8 - 1)))
    }
}

/// Cells of half a sixteenth: half way between two levels a cell ends, so that all values of a cell have one nearest level.
const CELLS: usize = 512;
/// Cells of one scale.
const PER_SCALE: f64 = 2.0 * PARTS as f64;
/// The cell that begins at zero.
const ZERO: f64 = (CELLS / 2) as f64;
/// 2^52: adding it to a whole number below puts that number in the low bits.
const WHOLE: f64 = 4_503_599_627_370_496.0;

/// A table by cells: the nearest level is looked up, not searched for. Half way between two it is the higher one.
pub(crate) struct Nearest {
    code: [u8; CELLS],
    level: [f32; LEVELS],
    top: f32,
}

impl Nearest {
    pub(crate) fn new(table: &Table) -> Self {
        let mut code = [0; CELLS];
        let mut at = 0;
        for (cell, code) in code.iter_mut().enumerate() {
            let begins = cell as i32 - ZERO as i32;
            let half = |k: usize| i32::from(table.levels[k]) + i32::from(table.levels[k + 1]);
            while at + 1 < table.len && begins >= half(at) {
                at += 1;
            }
            *code = at as u8;
        }
        let level = std::array::from_fn(|k| table.level(k as u8));
        Self { code, level, top: (table.len - 1) as f32 }
    }

    #[inline(always)]
    fn find(&self, steps: f64) -> u8 {
        let cell = (steps * PER_SCALE + ZERO).floor().max(0.0).min((CELLS - 1) as f64) + WHOLE;
        self.code[cell.to_bits() as usize % CELLS]
    }
}

impl Steps for &Nearest {
    #[inline(always)]
    fn code(self, steps: f64, _zero: f64) -> f64 {
        f64::from(self.find(steps))
    }

    #[inline(always)]
    fn step(self, code: f32, _zero: f32) -> f32 {
        self.level[code as usize % LEVELS]
    }

    #[inline(always)]
    fn two(self, steps: f32, _zero: f32) -> (f32, f32, bool) {
        let near = f32::from(self.find(f64::from(steps)));
        let other = if steps > self.step(near, 0.0) { near + 1.0 } else { near - 1.0 };
        (near, other, other >= 0.0 && other <= self.top)
    }

    #[inline(always)]
    fn nearest<const N: usize>(self, steps: [f64; N], _zero: [f64; N]) -> [f64; N] {
        steps.map(|steps| f64::from(self.level[usize::from(self.find(steps)) % LEVELS]))
    }
}
