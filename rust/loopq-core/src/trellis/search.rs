//! The search of one column: Viterbi's algorithm over the states, with rows that are coupled.
//!
//! With `A = U diag(p) U^T` the cost of a row is `p_i (e_i + sum_{h<i} U_hi e_h)^2`, which depends on the path. Every
//! survivor carries its own last errors; errors before those are taken from the best survivor. The bits that both ends of
//! a stream share are those of a first search through the seam.

use crate::factor::DampedFactor;
use crate::grid::{value, Trellis};
use crate::memory::{collected, zeros};
use crate::simd::{dots, per_isa, Isa, Short};
use crate::Result;

/// Rows at both sides of the seam that decide the bits shared by the two ends of a stream.
const SEAM: usize = 16;
/// Errors of a survivor that are told apart from those of the others.
const WINDOW: usize = size_of::<Short>() / size_of::<f32>();
/// What the memory of a search is for.
const SCRATCH: &str = "paths through a trellis";

/// Searches the columns of one run of rows; memory is kept from column to column.
pub(super) struct Search {
    trellis: Trellis,
    isa: Isa,
    rows: usize,
    /// Value of each state, `[b][p]` for state `p << bits | b`, so that a loop over `p` is contiguous.
    values: Vec<f32>,
    /// `p_i` over its mean.
    pivots: Vec<f32>,
    /// `U_hi` at `i * rows + h`.
    coupling: Vec<f32>,
    target: Vec<f32>,
    scale: Vec<f32>,
    survivors: Survivors,
}

/// The best path into every state, by the state that it is in.
struct Survivors {
    cost: Vec<f32>,
    /// What its next value should be.
    wanted: Vec<f32>,
    errors: Vec<Short>,
    /// What of its errors, but for the last, the next value has to make up for.
    made_up: Vec<f32>,
    /// Those of the row that is being added, the costs `[b][p]`.
    next: Vec<f32>,
    moved: Vec<Short>,
    from: Vec<u32>,
    /// First code of the state before, by row and `[b][p]`.
    history: Vec<u8>,
}

impl Search {
    pub(super) fn new(trellis: Trellis, left: &DampedFactor<f64>) -> Result<Self> {
        let rows = left.dim();
        let mean = left.pivots().iter().sum::<f64>() / rows as f64;
        let pivots = collected(SCRATCH, left.pivots().iter().map(|p| (p / mean) as f32))?;
        let mut coupling: Vec<f32> = zeros(SCRATCH, rows * rows)?;
        for i in 0..rows {
            for h in 0..i {
                coupling[i * rows + h] = left.entry(h, i) as f32;
            }
        }
        let (states, low) = (trellis.states(), trellis.low());
        let state = |at: usize| (((at % low) << trellis.bits()) | (at / low)) as u32;
        Ok(Self {
            trellis,
            isa: Isa::best(),
            rows,
            values: collected(SCRATCH, (0..states).map(|at| value(state(at))))?,
            pivots,
            coupling,
            target: zeros(SCRATCH, rows)?,
            scale: zeros(SCRATCH, rows)?,
            survivors: Survivors::new(states, rows.max(2 * SEAM))?,
        })
    }

    /// Writes the codes of a column that is near `target` in the metric `A`.
    pub(super) fn run(&mut self, target: &[f64], scale: &[f32], codes: &mut [u8]) -> Result<()> {
        let square = scale.iter().map(|&s| f64::from(s).powi(2)).sum::<f64>() / self.rows as f64;
        // In single precision: sizes are brought near one.
        let size = if square > 0.0 { square.sqrt() } else { 1.0 };
        for (to, from) in self.target.iter_mut().zip(target) {
            *to = (from / size) as f32;
        }
        for (to, &from) in self.scale.iter_mut().zip(scale) {
            *to = (f64::from(from) / size) as f32;
        }
        if self.rows * self.trellis.bits() as usize <= self.trellis.state_bits() as usize {
            self.try_all(codes);
            return Ok(());
        }
        self.viterbi(codes)
    }

    /// For a stream that is no longer than a state: every one is tried.
    fn try_all(&self, codes: &mut [u8]) {
        let (bits, rows) = (self.trellis.bits() as usize, self.rows);
        let digit = |stream: usize, i: usize| (stream >> (bits * i) & (self.trellis.digits() - 1)) as u8;
        let cost = |&stream: &usize| -> f32 {
            let states = self.trellis.states_of((0..rows).map(|i| digit(stream, i)));
            // No more rows than a state has bits.
            let mut errors = [0.0_f32; 16];
            for (i, (error, state)) in errors.iter_mut().zip(states).enumerate() {
                *error = self.scale[i] * value(state as u32) - self.target[i];
            }
            let row = |i: usize| {
                let others: f32 = (0..i).map(|h| self.coupling[i * rows + h] * errors[h]).sum();
                self.pivots[i] * (errors[i] + others).powi(2)
            };
            (0..rows).map(row).sum()
        };
        let best = (0..1 << (bits * rows)).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = digit(best, i);
        }
    }

    fn viterbi(&mut self, codes: &mut [u8]) -> Result<()> {
        let (rows, low) = (self.rows, self.trellis.low());
        let shared = self.seam()?;
        self.survivors.cost.fill(f32::INFINITY);
        self.survivors.cost[shared] = 0.0;
        self.advance(&collected(SCRATCH, 0..rows)?, 0)?;
        let costs = &self.survivors.cost;
        let ends = (shared..costs.len()).step_by(low);
        let mut state = ends.min_by(|&a, &b| costs[a].total_cmp(&costs[b])).unwrap_or(shared);
        let mask = self.trellis.digits() - 1;
        for at in (0..rows).rev() {
            codes[at] = (state & mask) as u8;
            state = self.before(at, state);
        }
        Ok(())
    }

    /// Bits that both ends share: those of the best path through the seam.
    fn seam(&mut self) -> Result<usize> {
        let width = SEAM.min(self.rows / 2);
        let rows: Vec<usize> = (self.rows - width..self.rows).chain(0..width).collect();
        self.survivors.cost.fill(0.0);
        self.advance(&rows, width)?;
        let mut state = self.survivors.best();
        for at in (width..2 * width).rev() {
            state = self.before(at, state);
        }
        Ok(state % self.trellis.low())
    }

    /// Goes over `rows`; those from place `coupled` on are coupled with each other, those before with none.
    fn advance(&mut self, rows: &[usize], coupled: usize) -> Result<()> {
        let mut decided: Vec<f32> = zeros(SCRATCH, rows.len())?;
        // Errors of the best survivor that have left the window, weighted for the row.
        let old = |coupling: &[f32], decided: &[f32], at: usize, row: usize| -> f32 {
            let end = at.saturating_sub(WINDOW).max(coupled);
            let weights = rows[coupled..end].iter().map(|&h| coupling[row * self.rows + h]);
            weights.zip(&decided[coupled..end]).map(|(c, e)| c * e).sum()
        };
        self.survivors.wanted.fill(self.target[rows[0]]);
        for (at, &row) in rows.iter().enumerate() {
            let next = rows.get(at + 1).copied();
            let mut coefficients = Short([0.0; WINDOW]);
            let (mut wanted, mut own) = (0.0, 0.0);
            if let Some(next) = next {
                let coupling = &self.coupling[next * self.rows..][..self.rows];
                for h in (at + 1).saturating_sub(WINDOW).max(coupled)..at {
                    coefficients.0[h % WINDOW] = coupling[rows[h]];
                }
                own = if at < coupled { 0.0 } else { coupling[row] };
                wanted = self.target[next] - old(&self.coupling, &decided, at + 1, next);
            }
            let step = Step {
                values: &self.values,
                digits: self.trellis.digits(),
                low: self.trellis.low(),
                scale: self.scale[row],
                target: self.target[row],
                pivot: self.pivots[row],
                slot: at % WINDOW,
                own,
                wanted,
            };
            let n = self.trellis.states();
            let s = &mut self.survivors;
            best_ways(self.isa, &step, s);
            for (to, &from) in s.history[at * n..(at + 1) * n].iter_mut().zip(&s.from) {
                *to = from as u8;
            }
            dots(self.isa, &s.errors, &coefficients, &mut s.made_up);
            move_on(self.isa, &step, s);
            if at + 1 >= WINDOW {
                // The slot that the next row takes over.
                let leaving = at + 1 - WINDOW;
                decided[leaving] = s.errors[s.best()].0[leaving % WINDOW];
            }
        }
        Ok(())
    }

    /// The state before the one at place `at`.
    fn before(&self, at: usize, state: usize) -> usize {
        let (low, bits) = (self.trellis.low(), self.trellis.bits());
        let (b, p) = (state & (self.trellis.digits() - 1), state >> bits);
        usize::from(self.survivors.history[at * self.trellis.states() + b * low + p]) * low + p
    }
}

impl Survivors {
    fn new(states: usize, rows: usize) -> Result<Self> {
        Ok(Self {
            cost: zeros(SCRATCH, states)?,
            wanted: zeros(SCRATCH, states)?,
            errors: collected(SCRATCH, (0..states).map(|_| Short([0.0; WINDOW])))?,
            made_up: zeros(SCRATCH, states)?,
            next: zeros(SCRATCH, states)?,
            moved: collected(SCRATCH, (0..states).map(|_| Short([0.0; WINDOW])))?,
            from: zeros(SCRATCH, states)?,
            history: zeros(SCRATCH, states * rows)?,
        })
    }

    /// The cheapest state, the first of several.
    fn best(&self) -> usize {
        let mut least = [f32::INFINITY; 16];
        for costs in self.cost.chunks_exact(16) {
            for (least, &c) in least.iter_mut().zip(costs) {
                *least = if c < *least { c } else { *least };
            }
        }
        let least = least.into_iter().fold(f32::INFINITY, f32::min);
        self.cost.iter().position(|&c| c == least).unwrap_or(0)
    }
}

/// What the survivors go through at one row.
struct Step<'a> {
    values: &'a [f32],
    digits: usize,
    low: usize,
    scale: f32,
    target: f32,
    pivot: f32,
    /// Slot of this row's errors.
    slot: usize,
    /// Coupling of the next row with this one.
    own: f32,
    /// What the next row's value should be but for the errors in the window.
    wanted: f32,
}

per_isa! {
    fn best_ways(step: &Step<'_>, s: &mut Survivors) = best_ways_body;
}

per_isa! {
    fn move_on(step: &Step<'_>, s: &mut Survivors) = move_on_body;
}

/// The cheapest way into every state.
#[inline(always)]
fn best_ways_body(step: &Step<'_>, s: &mut Survivors) {
    let (low, scale, pivot) = (step.low, step.scale, step.pivot);
    for b in 0..step.digits {
        let values = &step.values[b * low..(b + 1) * low];
        let best = &mut s.next[b * low..(b + 1) * low];
        let from = &mut s.from[b * low..(b + 1) * low];
        best.fill(f32::INFINITY);
        for x in 0..step.digits {
            let (cost, wanted) = (&s.cost[x * low..(x + 1) * low], &s.wanted[x * low..(x + 1) * low]);
            for p in 0..low {
                let d = scale * values[p] - wanted[p];
                let c = cost[p] + pivot * d * d;
                let better = c < best[p];
                best[p] = if better { c } else { best[p] };
                from[p] = if better { x as u32 } else { from[p] };
            }
        }
    }
}

/// Costs and errors go to the states that they belong to, and every survivor learns what its next value should be.
#[inline(always)]
fn move_on_body(step: &Step<'_>, s: &mut Survivors) {
    match step.digits {
        4 => spread::<4>(step, s),
        8 => spread::<8>(step, s),
        _ => spread::<16>(step, s),
    }
    std::mem::swap(&mut s.errors, &mut s.moved);
}

/// [`move_on`] for a number of codes that the compiler knows.
#[inline(always)]
fn spread<const D: usize>(step: &Step<'_>, s: &mut Survivors) {
    let (low, slot) = (step.low, step.slot % WINDOW);
    let n = low * D;
    let (made_up, errors) = (&s.made_up[..n], &s.errors[..n]);
    let (next, from, values) = (&s.next[..n], &s.from[..n], &step.values[..n]);
    let to = s.cost.chunks_exact_mut(D).zip(s.wanted.chunks_exact_mut(D)).zip(s.moved.chunks_exact_mut(D));
    for (p, ((cost, wanted), moved)) in to.enumerate().take(low) {
        for b in 0..D {
            let at = b * low + p;
            let before = (from[at] as usize * low + p).min(n - 1);
            let error = step.scale * values[at] - step.target;
            cost[b] = next[at];
            wanted[b] = step.wanted - (made_up[before] + step.own * error);
            moved[b] = errors[before];
            moved[b].0[slot] = error;
        }
    }
}
