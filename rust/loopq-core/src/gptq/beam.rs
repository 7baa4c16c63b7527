//! Beam search: GPTQ's sweep over one row with several paths of codes open.
//!
//! GPTQ takes the nearest code in every column. Here every path goes on with its two nearest codes, and the cheapest of
//! all that makes are kept: the M-algorithm of J. Anderson and S. Mohan, *Sequential Coding Algorithms* (IEEE Trans.
//! Communications, 1984), which lattice decoders know as K-best (Z. Guo and P. Nilsson, IEEE JSAC, 2006). The cost of a path
//! is GPTQ's proxy so far, `sum_j p_j (w'_j - q_j)^2`.
//!
//! Paths differ in the codes of the last one to two blocks of columns; the codes before are those of the path that was
//! best, and its errors reach the later columns as GPTQ's do. In single precision, in units of powers of two: what is
//! scaled by one scales with it. Only codes are taken from here; the solver computes their loss in double precision.

use crate::grid::Steps;
use crate::memory::{collected, zeros};
use crate::simd::{per_isa, Isa};
use crate::Result;

/// Columns of a block.
pub(super) const BLOCK: usize = 64;

/// Columns that are changed together.
const STRIP: usize = 16;

/// Columns of a block, strip by strip.
pub(super) type Strips = [[f32; STRIP]; BLOCK / STRIP];

/// What the memory of the paths is for.
pub(super) const SCRATCH: &str = "paths of codes";

/// The paths of one row.
pub(super) struct Beam {
    paths: Vec<Path>,
    /// Above that of the best path; infinite where no path is.
    cost: Vec<f32>,
    /// This column's weight, as the errors before change it.
    wanted: Vec<f32>,
    /// What each path can go on with.
    nearest: Choices,
    second: Choices,
    /// Cost of the best path.
    spent: f64,
}

#[derive(Clone)]
struct Path {
    /// Codes of the block before, and of this one.
    codes: [[u8; BLOCK]; 2],
    /// Columns of this block, as the errors before change them.
    ahead: Strips,
}

/// One code for each path.
struct Choices {
    code: Vec<f32>,
    cost: Vec<f32>,
}

/// What is the same for all rows of a block of columns.
pub(super) struct Block<'a, S> {
    /// `A_ij`, `i` over the block before and this one, `j` over this one.
    pub(super) a: &'a [Strips],
    /// Of each of its columns.
    pub(super) pivots: &'a [f32],
    /// What codes stand for.
    pub(super) steps: S,
    pub(super) isa: Isa,
}

/// One row of it, in units of the row: the block before, which holds zeros at the first block, and this one.
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
        let path = Path { codes: [[0; BLOCK]; 2], ahead: Strips::default() };
        Ok(Self {
            paths: collected(SCRATCH, (0..n).map(|_| path.clone()))?,
            cost,
            wanted: zeros(SCRATCH, n)?,
            nearest: Choices { code: zeros(SCRATCH, n)?, cost: zeros(SCRATCH, n)? },
            second: Choices { code: zeros(SCRATCH, n)?, cost: zeros(SCRATCH, n)? },
            spent: 0.0,
        })
    }

    /// Decides the codes of the block before, those of the best path, and makes this block the one before. Paths with
    /// other codes end here.
    pub(super) fn decide(&mut self) -> [u8; BLOCK] {
        let [decided, _] = self.paths[self.best()].codes;
        for (path, cost) in self.paths.iter_mut().zip(&mut self.cost) {
            if path.codes[0] != decided {
                *cost = f32::INFINITY;
            }
            path.codes[0] = path.codes[1];
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
        for j in 0..block.pivots.len() {
            weigh(block.isa, self, block, row, j);
            choose(block.isa, self, j);
            go_on(block.isa, self, block, row, j);
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
    fn choose(beam: &mut Beam, j: usize) = choose_body;
}

per_isa! {
    fn go_on<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) = go_on_body;
}

/// Changes the columns ahead by the errors of the block before.
#[inline(always)]
fn begin_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row) {
    for path in &mut beam.paths {
        let mut errors = [0.0; BLOCK];
        for (i, error) in errors.iter_mut().enumerate() {
            let step = block.steps.step(f32::from(path.codes[0][i]), row.zero[i]);
            *error = row.original[i] - step * row.scale[i];
        }
        let mut ahead = row.updated;
        for (a, &error) in block.a.iter().zip(&errors) {
            change(&mut ahead, a, error);
        }
        path.ahead = ahead;
    }
}

/// Costs of all that the paths could go on with.
#[inline(always)]
fn weigh_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) {
    let n = beam.paths.len();
    let (scale, zero, steps, pivot) =
        (row.scale[BLOCK + j], row.zero[BLOCK + j], block.steps, block.pivots[j]);
    for (wanted, path) in beam.wanted.iter_mut().zip(&beam.paths) {
        *wanted = path.ahead[j / STRIP][j % STRIP];
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

/// Keeps the cheapest choices. A path goes on with its nearest code where it stands, and one with a second code where a
/// path has ended.
#[inline(always)]
fn choose_body(beam: &mut Beam, j: usize) {
    let Beam { paths, cost, nearest, second, .. } = beam;
    let n = paths.len();
    let (near, other) = (&nearest.cost[..n], &second.cost[..n]);
    let least = near.iter().copied().fold(f32::INFINITY, f32::min);
    let most = dearest(near, other);
    for p in 0..n {
        paths[p].codes[1][j] = nearest.code[p] as u8;
        cost[p] = near[p] - least;
    }
    let ended = (0..n).filter(|&p| near[p] > most).chain((0..n).filter(|&p| near[p] == most));
    let taken = (0..n).filter(|&p| other[p] < most).chain((0..n).filter(|&p| other[p] == most));
    for (from, to) in taken.zip(ended).take_while(|&(from, to)| other[from] < near[to]) {
        paths[to] = paths[from].clone();
        paths[to].codes[1][j] = second.code[from] as u8;
        cost[to] = other[from] - least;
    }
    beam.spent += f64::from(least);
}

/// Cost of the dearest choice that is kept, the `n`-th cheapest of `2 n`: by bisection, on the bits of costs, which are in
/// the order of the costs.
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

/// Changes the columns ahead by the errors of this one.
#[inline(always)]
fn go_on_body<S: Steps>(beam: &mut Beam, block: &Block<'_, S>, row: &Row, j: usize) {
    let (from, a) = (j / STRIP, &block.a[BLOCK + j]);
    let (original, scale, zero) = (row.original[BLOCK + j], row.scale[BLOCK + j], row.zero[BLOCK + j]);
    for path in &mut beam.paths {
        let error = original - block.steps.step(f32::from(path.codes[1][j]), zero) * scale;
        change(&mut path.ahead[from..], &a[from..], error);
    }
}

/// Adds `error a`. A strip is loaded whole before it is stored, so that the compiler can make it vectors.
#[inline(always)]
fn change(ahead: &mut [[f32; STRIP]], a: &[[f32; STRIP]], error: f32) {
    for (to, a) in ahead.iter_mut().zip(a) {
        *to = std::array::from_fn(|k| to[k] + error * a[k]);
    }
}
