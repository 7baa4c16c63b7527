//! Beam search: GPTQ's sweep over one row with several paths of codes open.
//!
//! GPTQ takes the nearest code in every column. Here every path is extended by its two nearest codes, and the cheapest
//! extensions are kept. This is the M-algorithm of J. Anderson and S. Mohan, *Sequential Coding Algorithms* (IEEE
//! Trans. Communications, 1984); lattice decoders call it K-best (Z. Guo and P. Nilsson, IEEE JSAC, 2006). The cost of
//! a path is GPTQ's proxy so far, `sum_j p_j (w'_j - q_j)^2`.
//!
//! Paths differ in the codes of the last one to two blocks of columns. Earlier codes are those of the best path, and
//! its errors reach the later columns as GPTQ's do. All is in single precision and in units of powers of two, so
//! scaling the input by a power of two scales the result. Only the codes are used; the solver computes their loss in
//! double precision.

use crate::grid::Steps;
use crate::memory::{collected, zeros};
use crate::simd::{per_isa, Isa};
use crate::Result;

/// Columns of a block.
pub const BLOCK: usize = 64;

/// Columns of a strip: inside it errors reach the columns ahead at once, and later strips together at its end.
pub const STRIP: usize = 16;

/// Columns of a block, strip by strip.
pub(super) type Strips = [[f32; STRIP]; BLOCK / STRIP];

/// Name of the paths' memory in errors.
pub(super) const SCRATCH: &str = "paths of codes";

/// The paths of one row.
pub(super) struct Beam {
    /// Codes of the block before, and of this one up to the strip.
    codes: Vec<[[u8; BLOCK]; 2]>,
    /// Columns of the block from the strip on, as the errors before the strip change them.
    ahead: Vec<Strips>,
    /// Both as they were before the strip, while they change.
    old_codes: Vec<[[u8; BLOCK]; 2]>,
    old_ahead: Vec<Strips>,
    /// The paths inside the strip. Each refers to its origin in `codes` and `ahead`, so that copying a path copies
    /// little more than a strip.
    paths: Vec<Path>,
    /// Above that of the best path; infinite where no path is.
    cost: Vec<f32>,
    /// This column's weight, as the errors before change it.
    wanted: Vec<f32>,
    /// Candidates for each path's next code.
    nearest: Choices,
    second: Choices,
    /// Paths that end in a column, and paths that are extended by both codes.
    ended: Vec<u32>,
    taken: Vec<u32>,
    /// Cost of the best path.
    spent: f64,
}

/// A path through one strip.
#[derive(Clone, Copy, Default)]
struct Path {
    /// Columns of the strip, as the errors before change them.
    ahead: [f32; STRIP],
    errors: [f32; STRIP],
    codes: [u8; STRIP],
    origin: u32,
}

/// One code for each path.
struct Choices {
    code: Vec<f32>,
    cost: Vec<f32>,
}

/// Data shared by all rows of a block of columns.
pub(super) struct Block<'a, S> {
    /// `A_ij`, `i` over the block before and this one, `j` over this one.
    pub(super) a: &'a [Strips],
    /// Of each of its columns.
    pub(super) pivots: &'a [f32],
    /// Decodes codes, in units of the scale.
    pub(super) steps: S,
    pub(super) isa: Isa,
}

/// One row of the block, in units of the row. The arrays hold the previous block (zeros at the first one) and this one.
pub(super) struct Row {
    pub(super) original: [f32; 2 * BLOCK],
    pub(super) scale: [f32; 2 * BLOCK],
    pub(super) zero: [f32; 2 * BLOCK],
    /// This block's weights as the errors of all columns but those of the block before change them.
    pub(super) updated: Strips,
}

impl Beam {
    pub(super) fn new(n: usize) -> Result<Self> {
        let mut cost = zeros(SCRATCH, n)?;
        cost[1..].fill(f32::INFINITY);
        Ok(Self {
            codes: collected(SCRATCH, (0..n).map(|_| [[0; BLOCK]; 2]))?,
            ahead: collected(SCRATCH, (0..n).map(|_| Strips::default()))?,
            old_codes: collected(SCRATCH, (0..n).map(|_| [[0; BLOCK]; 2]))?,
            old_ahead: collected(SCRATCH, (0..n).map(|_| Strips::default()))?,
            paths: collected(SCRATCH, (0..n).map(|_| Path::default()))?,
            cost,
            wanted: zeros(SCRATCH, n)?,
            nearest: Choices { code: zeros(SCRATCH, n)?, cost: zeros(SCRATCH, n)? },
            second: Choices { code: zeros(SCRATCH, n)?, cost: zeros(SCRATCH, n)? },
            ended: zeros(SCRATCH, n)?,
            taken: zeros(SCRATCH, n)?,
            spent: 0.0,
        })
    }

    /// Decides the codes of the block before, those of the best path, and makes this block the one before. Paths with
    /// other codes end here.
    pub(super) fn decide(&mut self) -> [u8; BLOCK] {
        let [decided, _] = self.codes[self.best()];
        for (codes, cost) in self.codes.iter_mut().zip(&mut self.cost) {
            if codes[0] != decided {
                *cost = f32::INFINITY;
            }
            codes[0] = codes[1];
        }
        decided
    }

    /// Cost of the best path, in the units of the row, as single precision has it.
    pub(super) fn spent(&self) -> f64 {
        self.spent
    }

    /// Takes the paths through a block.
    pub(super) fn advance<S: Steps>(&mut self, block: &Block<'_, S>, row: &Row) {
        begin(block.isa, self, block, row);
        for (strip, pivots) in block.pivots.chunks(STRIP).enumerate() {
            for (p, (path, ahead)) in self.paths.iter_mut().zip(&self.ahead).enumerate() {
                *path = Path { ahead: ahead[strip], origin: p as u32, ..Path::default() };
            }
            for j in strip * STRIP..strip * STRIP + pivots.len() {
                weigh(block.isa, self, block, row, j);
                choose(block.isa, self, j % STRIP);
                go_on(block.isa, self, block, row, j);
            }
            end(block.isa, self, block, strip);
        }
    }

    /// The cheapest path, the first of several.
    fn best(&self) -> usize {
        let least = self.cost.iter().copied().fold(f32::INFINITY, f32::min);
        self.cost.iter().position(|&c| c == least).unwrap_or(0)
    }
}

per_isa! {
    fn begin<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row) = begin_body;
}

per_isa! {
    fn weigh<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) = weigh_body;
}

per_isa! {
    fn choose(beam: &mut Beam, at: usize) = choose_body;
}

per_isa! {
    fn go_on<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) = go_on_body;
}

per_isa! {
    fn end<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, strip: usize) = end_body;
}

/// Changes the columns ahead by the errors of the block before.
#[inline(always)]
fn begin_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row) {
    for ((codes, to), &cost) in beam.codes.iter().zip(&mut beam.ahead).zip(&beam.cost) {
        if cost == f32::INFINITY {
            continue;
        }
        let [mut first, mut second, mut third, mut fourth] = row.updated;
        for (i, a) in block.a[..BLOCK].iter().enumerate() {
            let step = block.steps.step(f32::from(codes[0][i]), row.zero[i]);
            let error = row.original[i] - step * row.scale[i];
            first = added(&first, error, &a[0]);
            second = added(&second, error, &a[1]);
            third = added(&third, error, &a[2]);
            fourth = added(&fourth, error, &a[3]);
        }
        *to = [first, second, third, fourth];
    }
}

/// Costs of all that the paths could go on with.
#[inline(always)]
fn weigh_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) {
    let n = beam.paths.len();
    let (scale, zero, steps, pivot) =
        (row.scale[BLOCK + j], row.zero[BLOCK + j], block.steps, block.pivots[j]);
    for (wanted, path) in beam.wanted.iter_mut().zip(&beam.paths) {
        *wanted = path.ahead[j % STRIP];
    }
    let (wanted, costs) = (&beam.wanted[..n], &beam.cost[..n]);
    let (near_code, near_cost) = (&mut beam.nearest.code[..n], &mut beam.nearest.cost[..n]);
    let (second_code, second_cost) = (&mut beam.second.code[..n], &mut beam.second.cost[..n]);
    for p in 0..n {
        let (wanted, cost) = (wanted[p], costs[p]);
        let (near, other, inside) = steps.two(wanted / scale, zero);
        let gap = wanted - steps.step(near, zero) * scale;
        let other_gap = wanted - steps.step(other, zero) * scale;
        let first = cost + pivot * (gap * gap);
        let then = if inside { cost + pivot * (other_gap * other_gap) } else { f32::INFINITY };
        // Half way between two codes rounding can have named the further one.
        let turned = then < first;
        (near_cost[p], second_cost[p]) = if turned { (then, first) } else { (first, then) };
        (near_code[p], second_code[p]) = if turned { (other, near) } else { (near, other) };
    }
}

/// Keeps the cheapest choices of column `at` of the strip. A path is extended by its nearest code in place; an
/// extension by a second code takes the place of a path that has ended.
#[inline(always)]
fn choose_body(beam: &mut Beam, at: usize) {
    let Beam { paths, cost, nearest, second, ended, taken, .. } = beam;
    let n = paths.len();
    let (near, other) = (&nearest.cost[..n], &second.cost[..n]);
    let least = near.iter().copied().fold(f32::INFINITY, f32::min);
    let most = dearest(near, other);
    for p in 0..n {
        paths[p].codes[at] = nearest.code[p] as u8;
        cost[p] = near[p] - least;
    }
    let mut ends = marked(ended, 0, near, |c| c > most);
    let mut takes = marked(taken, 0, other, |c| c < most);
    // Choices of the same cost as the dearest one fill the rest; only one side has room for them.
    if takes > ends {
        ends = marked(ended, ends, near, |c| c == most);
    } else if ends > takes {
        takes = marked(taken, takes, other, |c| c == most);
    }
    for (&from, &to) in taken[..takes].iter().zip(&ended[..ends]) {
        let (from, to) = (from as usize, to as usize);
        paths[to] = paths[from];
        paths[to].codes[at] = second.code[from] as u8;
        cost[to] = other[from] - least;
    }
    beam.spent += f64::from(least);
}

/// Appends to the first `n` entries of a list the places of the costs that fulfil a condition; returns how many it has.
#[inline(always)]
fn marked(list: &mut [u32], mut n: usize, costs: &[f32], is: impl Fn(f32) -> bool) -> usize {
    for (p, &cost) in costs.iter().enumerate() {
        // Written unconditionally, so that there is no branch to predict.
        if let Some(to) = list.get_mut(n) {
            *to = p as u32;
        }
        n += usize::from(is(cost));
    }
    n
}

/// Cost of the dearest kept choice, the `n`-th cheapest of `2 n`. Found by bisection on the bits of costs, which sort
/// as the costs do.
#[inline(always)]
fn dearest(near: &[f32], other: &[f32]) -> f32 {
    let n = near.len() as u32;
    // As many choices cost no more than `high`, fewer than that no more than `low`.
    let mut high = near.iter().copied().fold(0.0, f32::max).to_bits();
    let mut low = near.iter().copied().fold(f32::INFINITY, f32::min).to_bits().saturating_sub(1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let limit = f32::from_bits(middle);
        let kept =
            near.iter().zip(other).map(|(&a, &b)| u32::from(a <= limit) + u32::from(b <= limit)).sum::<u32>();
        if kept < n {
            low = middle;
        } else {
            high = middle;
            if kept == n {
                break;
            }
        }
    }
    f32::from_bits(high)
}

/// Changes the columns of the strip by the errors of this one.
#[inline(always)]
fn go_on_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) {
    let (strip, at) = (j / STRIP, j % STRIP);
    let a = &block.a[BLOCK + j][strip];
    let (original, scale, zero) = (row.original[BLOCK + j], row.scale[BLOCK + j], row.zero[BLOCK + j]);
    for path in &mut beam.paths {
        let error = original - block.steps.step(f32::from(path.codes[at]), zero) * scale;
        path.errors[at] = error;
        path.ahead = added(&path.ahead, error, a);
    }
}

/// Brings codes and the strips after this one up to date, each path from where it comes from.
#[inline(always)]
fn end_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, strip: usize) {
    let Beam { codes, ahead, paths, old_codes, old_ahead, .. } = beam;
    std::mem::swap(codes, old_codes);
    std::mem::swap(ahead, old_ahead);
    let a = &block.a[BLOCK + strip * STRIP..][..STRIP];
    for ((path, codes), ahead) in paths.iter().zip(codes).zip(ahead) {
        let origin = path.origin as usize;
        *codes = old_codes[origin];
        codes[1][strip * STRIP..][..STRIP].copy_from_slice(&path.codes);
        for later in strip + 1..BLOCK / STRIP {
            let mut to = old_ahead[origin][later];
            for (a, &error) in a.iter().zip(&path.errors) {
                to = added(&to, error, &a[later]);
            }
            ahead[later] = to;
        }
    }
}

/// `to + error a`, as a value, so that the compiler keeps it in vectors.
#[inline(always)]
fn added(to: &[f32; STRIP], error: f32, a: &[f32; STRIP]) -> [f32; STRIP] {
    std::array::from_fn(|k| to[k] + error * a[k])
}
