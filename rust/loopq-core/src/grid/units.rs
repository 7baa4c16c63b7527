//! Scales and offsets that are whole numbers of units, which some groups of a row share. Format: `docs/formats/gguf.md`.
//!
//! The search knows the diagonal of the loss alone. It takes three steps: scales and offsets of each group by shrunken
//! ranges and least squares; the units of least loss for whole multiples; then single steps of the multiples and least
//! squares for the units, in turn. Solvers start from the result; descents continue with the whole matrix.

use crate::grid::{by_steps, Grid, GroupScale, Rounding, Steps};
use crate::memory::collected;
use crate::simd::{per_isa, Isa, Real};
use crate::{Error, Result};

/// How groups of a row share units, kept in half precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    groups: usize,
    scales: (i16, i16),
    offsets: i16,
    parts: u8,
}

/// The target of a step: a scale or an offset of one group, or a unit of either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Scale,
    Offset,
    ScaleUnit,
    OffsetUnit,
}

impl Part {
    /// Whether it is that of a single group.
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Self::Scale | Self::Offset)
    }
}

impl Units {
    /// `groups` share the units; a scale is `scales.0` to `scales.1` of one, an offset 0 to `offsets` of the other. Half
    /// precision holds a unit of scales over `parts`.
    pub fn new(groups: usize, scales: (i16, i16), offsets: i16, parts: u8) -> Result<Self> {
        let ascend = scales.1 >= 1 && scales.0 <= scales.1;
        if groups == 0 || parts == 0 || !ascend || !(0..=255).contains(&offsets) {
            let allowed = "1 or more groups, scales up to 1 or more units, offsets up to 0 to 255";
            return Err(Error::setting("units", format!("{groups}, {scales:?}, {offsets}"), allowed));
        }
        Ok(Self { groups, scales, offsets, parts })
    }

    /// Groups that share units.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Whether an offset is added to values.
    #[must_use]
    pub fn has_offsets(&self) -> bool {
        self.offsets > 0
    }

    /// Possible targets in groups that share units, from the single group to all.
    pub(crate) fn parts(&self) -> &'static [Part] {
        match (self.groups, self.has_offsets()) {
            (1, false) => &[Part::ScaleUnit],
            (1, true) => &[Part::ScaleUnit, Part::OffsetUnit],
            (_, false) => &[Part::Scale, Part::ScaleUnit],
            (_, true) => &[Part::Scale, Part::Offset, Part::ScaleUnit, Part::OffsetUnit],
        }
    }

    /// How many units a scale and an offset are.
    pub(crate) fn counts(&self, one: &GroupScale) -> (f64, f64) {
        let count = |value: f32, unit: f32| match self.groups {
            1 => 1.0,
            _ if unit == 0.0 => 0.0,
            _ => f64::from(value) / f64::from(unit),
        };
        (count(one.scale, one.units[0]), count(one.offset, one.units[1]))
    }

    fn offset_limits(&self) -> (i16, i16) {
        (i16::from(self.groups == 1).min(self.offsets), self.offsets)
    }

    fn stored(&self, units: [f64; 2], counts: (f64, f64), zero: u8) -> GroupScale {
        let scale = units[0] * whole(counts.0, self.scales);
        let offset = units[1] * whole(counts.1, self.offset_limits());
        GroupScale { scale: scale as f32, offset: offset as f32, units: units.map(|unit| unit as f32), zero }
    }

    fn scale_unit(&self, wanted: f64) -> f64 {
        half(wanted / f64::from(self.parts)) * f64::from(self.parts)
    }

    /// The scale and offset of a group as far as can be stored after one part has moved by `by`.
    pub(crate) fn moved(&self, one: &GroupScale, part: Part, by: f64) -> GroupScale {
        let (mut counts, mut units) = (self.counts(one), one.units.map(f64::from));
        match part {
            Part::Scale => counts.0 += by / units[0],
            Part::Offset => counts.1 += by / units[1],
            Part::ScaleUnit => units[0] = self.scale_unit(units[0] + by),
            Part::OffsetUnit => units[1] = half(units[1] + by),
        }
        let found = self.stored(units, counts, one.zero);
        if found.scale.is_finite() && found.offset.is_finite() && by.is_finite() {
            found
        } else {
            *one
        }
    }
}

/// The nearest whole number within limits; the least one of what is no number, such as of a unit of zero.
fn whole(count: f64, (low, high): (i16, i16)) -> f64 {
    count.round_ties_even().max(f64::from(low)).min(f64::from(high))
}

fn half(value: f64) -> f64 {
    f64::from(half::f16::from_f64(value).to_f32())
}

/// Shrunken ranges that the search of a group begins with, and how much each is smaller than the one before.
const SHRINKS: usize = 26;
const SHRINK: f64 = 0.02;
const WIDEST: f64 = 1.04;
/// Whole numbers from the largest on that the largest scale or offset is tried as.
const TOPS: i16 = 8;
/// Turns of single steps and of units.
const TURNS: usize = 3;

/// Scales and offsets of the groups of a block, for each lane: `lines` are its columns of `lanes` values each.
pub(crate) fn fit_units<T: Real>(
    isa: Isa,
    (grid, units): (&Grid, Units),
    lines: &[T],
    lanes: usize,
    weights: &[f64],
) -> std::result::Result<Vec<GroupScale>, (usize, Error)> {
    let rounding = grid.rounding();
    let width = grid.group(lines.len() / lanes.max(1));
    let mut out = vec![GroupScale::default(); lines.len().div_ceil(lanes * width) * lanes];
    for lane in 0..lanes {
        let values = lines.iter().skip(lane).step_by(lanes).map(|v| v.wide());
        let values = collected("values of a block", values).map_err(|e| (lane, e))?;
        let block = Block { isa, grid, units, rounding: &rounding, width, values, weights };
        for (g, one) in block.fitted().map_err(|e| (lane, e))?.into_iter().enumerate() {
            out[g * lanes + lane] = one;
        }
    }
    Ok(out)
}

/// The groups of one row that share units.
struct Block<'a> {
    isa: Isa,
    grid: &'a Grid,
    units: Units,
    rounding: &'a Rounding,
    width: usize,
    values: Vec<f64>,
    weights: &'a [f64],
}

/// Weighted sums over a group: of the square error at a scale and offset, and of products of the steps `q` nearest
/// there and values `x`.
#[derive(Clone, Copy, Default)]
struct Sums {
    cost: f64,
    one: f64,
    q: f64,
    qq: f64,
    x: f64,
    qx: f64,
}

impl Block<'_> {
    fn fitted(&self) -> Result<Vec<GroupScale>> {
        let n = self.values.len().div_ceil(self.width);
        let wanted: Vec<(f64, f64)> = (0..n).map(|g| self.alone(g)).collect();
        let limits @ (low, high) = self.units.scales;
        let tops = (low..=high).filter(|&top| top > high - TOPS || (low < 0 && top < low + TOPS));
        let rounded = |unit| self.units.scale_unit(unit);
        let unit = self.unit(wanted.iter().map(|w| w.0), (tops, rounded), |unit, g| {
            (unit * whole(wanted[g].0 / unit, limits), wanted[g].1)
        })?;
        let scales: Vec<f64> = wanted.iter().map(|w| whole(w.0 / unit, limits)).collect();
        let offset = |g: usize| self.best_offset(g, unit * scales[g], wanted[g].1);
        let offsets: Vec<f64> = (0..n).map(offset).collect();
        let limits @ (_, most) = self.units.offset_limits();
        let tops = (1..=most).filter(|&top| top > most - TOPS);
        let other = self.unit(offsets.iter().copied(), (tops, half), |other, g| {
            (unit * scales[g], other * whole(offsets[g] / other, limits))
        })?;
        let zero = if self.grid.symmetric { self.grid.middle() } else { 0 };
        let one = |g: usize| self.units.stored([unit, other], (scales[g], offsets[g] / other), zero);
        let mut found: Vec<GroupScale> = (0..n).map(one).collect();
        for _ in 0..TURNS {
            if !self.step(&mut found) & !self.rescale(&mut found) {
                break;
            }
        }
        Ok(found)
    }

    fn group(&self, g: usize) -> (&[f64], &[f64]) {
        let own = g * self.width..self.values.len().min((g + 1) * self.width);
        (&self.values[own.clone()], &self.weights[own])
    }

    fn sums(&self, g: usize, scale: f64, offset: f64) -> Sums {
        let (values, weights) = self.group(g);
        let zero = if self.grid.symmetric { f64::from(self.grid.middle()) } else { 0.0 };
        by_steps!(self.rounding, |steps| sums(self.isa, values, weights, [scale, offset, zero], steps))
    }

    /// Scale and offset of a group of least error, as real numbers.
    fn alone(&self, g: usize) -> (f64, f64) {
        let (values, _) = self.group(g);
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut best, mut least) = ((0.0, 0.0), f64::INFINITY);
        let mut take = |one: (f64, f64)| {
            let sums = self.sums(g, one.0, one.1);
            if sums.cost < least {
                (best, least) = (one, sums.cost);
            }
            sums
        };
        for k in 0..SHRINKS {
            let shrink = WIDEST - k as f64 * SHRINK;
            if self.units.has_offsets() {
                let low = if self.units.groups > 1 { low.min(0.0) } else { low };
                let middle = f64::midpoint(low, high);
                let scale = (high - low).max(0.0) * shrink / f64::from(self.grid.top());
                let mut at = (scale, middle + (low - middle) * shrink);
                for _ in 0..3 {
                    let s = take(at);
                    let det = s.one * s.qq - s.q * s.q;
                    let scale = (s.one * s.qx - s.q * s.x) / det;
                    at = (scale, (s.x - scale * s.q) / s.one);
                    if self.units.groups > 1 && at.1 > 0.0 {
                        at = (s.qx / s.qq, 0.0);
                    }
                    if !(at.0.is_finite() && at.1.is_finite()) {
                        break;
                    }
                }
                continue;
            }
            for sign in [1.0, -1.0] {
                let ends = if sign > 0.0 {
                    (low.min(0.0), high.max(0.0))
                } else {
                    ((-high).min(0.0), (-low).max(0.0))
                };
                let s = take((sign * shrink * self.grid.widest(ends.0, ends.1), 0.0));
                let scale = s.qx / s.qq;
                if scale.is_finite() {
                    take((scale, 0.0));
                }
            }
        }
        best
    }

    /// The offset of least error with a scale that is known.
    fn best_offset(&self, g: usize, scale: f64, offset: f64) -> f64 {
        if !self.units.has_offsets() {
            return 0.0;
        }
        let s = self.sums(g, scale, offset);
        let found = (s.x - scale * s.q) / s.one;
        let found = if self.units.groups > 1 { found.min(0.0) } else { found };
        if found.is_finite() {
            found
        } else {
            offset
        }
    }

    /// The unit of least error among those of which the largest number is `tops` units.
    fn unit(
        &self,
        numbers: impl Iterator<Item = f64>,
        (tops, rounded): (impl Iterator<Item = i16>, impl Fn(f64) -> f64),
        one: impl Fn(f64, usize) -> (f64, f64),
    ) -> Result<f64> {
        let (mut n, mut largest) = (0, 0.0_f64);
        for number in numbers {
            n += 1;
            if number.abs() > largest.abs() {
                largest = number;
            }
        }
        let (mut best, mut least) = (0.0, f64::INFINITY);
        let mut tried = 0;
        for top in tops.filter(|&top| top != 0) {
            tried += 1;
            let unit = rounded(largest / f64::from(top));
            if unit == 0.0 || !unit.is_finite() {
                continue;
            }
            let cost =
                (0..n).map(|g| one(unit, g)).enumerate().map(|(g, (s, m))| self.sums(g, s, m).cost).sum();
            if cost < least {
                (best, least) = (unit, cost);
            }
        }
        if best == 0.0 && tried > 0 && half(largest).is_infinite() {
            return Err(Error::ScaleRange { row: 0, group: 0, value: largest, dtype: "float16" });
        }
        Ok(best)
    }

    /// One step of the numbers of each group, where that loses less; whether any did.
    fn step(&self, found: &mut [GroupScale]) -> bool {
        let mut gained = false;
        for (g, one) in found.iter_mut().enumerate() {
            let (scale, offset) = self.units.counts(one);
            let cost = |l: &GroupScale| self.sums(g, f64::from(l.scale), f64::from(l.offset)).cost;
            let (before, mut least) = (*one, cost(one));
            for (a, b) in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)] {
                let counts = (scale + f64::from(a), offset + f64::from(b));
                let tried = self.units.stored(before.units.map(f64::from), counts, before.zero);
                let now = cost(&tried);
                if now < least {
                    (*one, least, gained) = (tried, now, true);
                }
            }
        }
        gained
    }

    /// Units of least error with the steps and numbers that there are; whether that loses less.
    fn rescale(&self, found: &mut [GroupScale]) -> bool {
        let mut gained = false;
        for part in [Part::ScaleUnit, Part::OffsetUnit] {
            let (mut above, mut below, mut before) = (0.0, 0.0, 0.0);
            for (g, one) in found.iter().enumerate() {
                let (scale, offset) = (f64::from(one.scale), f64::from(one.offset));
                let (s, (a, b)) = (self.sums(g, scale, offset), self.units.counts(one));
                before += s.cost;
                if part == Part::ScaleUnit {
                    above += a * (s.qx - offset * s.q - scale * s.qq);
                    below += a * a * s.qq;
                } else {
                    above += b * (s.x - scale * s.q - offset * s.one);
                    below += b * b * s.one;
                }
            }
            let moved: Vec<GroupScale> =
                found.iter().map(|l| self.units.moved(l, part, above / below)).collect();
            let cost =
                |(g, l): (usize, &GroupScale)| self.sums(g, f64::from(l.scale), f64::from(l.offset)).cost;
            if moved.iter().enumerate().map(cost).sum::<f64>() < before {
                found.copy_from_slice(&moved);
                gained = true;
            }
        }
        gained
    }
}

/// Sums that are made side by side.
const WIDE: usize = 8;

per_isa! {
    fn sums<S: Steps>(values: &[f64], weights: &[f64], one: [f64; 3], steps: S) -> Sums = sums_body;
}

#[inline(always)]
fn sums_body<S: Steps>(values: &[f64], weights: &[f64], [scale, offset, zero]: [f64; 3], steps: S) -> Sums {
    let mut sums = [[0.0; WIDE]; 6];
    for (values, weights) in values.chunks(WIDE).zip(weights.chunks(WIDE)) {
        let (mut x, mut w, mut q) = ([0.0; WIDE], [0.0; WIDE], [0.0; WIDE]);
        x[..values.len()].copy_from_slice(values);
        w[..weights.len()].copy_from_slice(weights);
        if scale != 0.0 {
            let wanted = x.map(|x| (x - offset) / scale);
            q = steps.nearest(wanted, [zero; WIDE]);
        }
        for i in 0..WIDE {
            let gap = x[i] - offset - q[i] * scale;
            let (qw, xw) = (q[i] * w[i], x[i] * w[i]);
            for (sum, more) in sums.iter_mut().zip([w[i] * gap * gap, w[i], qw, qw * q[i], xw, qw * x[i]]) {
                sum[i] += more;
            }
        }
    }
    let [cost, one, q, qq, x, qx] = sums.map(|lanes| lanes.iter().sum());
    Sums { cost, one, q, qq, x, qx }
}
