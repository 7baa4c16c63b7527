//! The open paths of a search, and the loops that every weight pays for.
//!
//! A node is the part that two states in a row share: all of a state but its first code. A state is the way from one
//! node to the next: `2^bits` states lead into every node, one for each first code, and only the cheapest stays open.
//! So paths, costs and errors are kept by node, `2^bits` times fewer than states; a cost of a state is computed and
//! compared in registers.
//!
//! Costs are positive, so their bits sort as the costs do. The last bits of a cost hold the first code of its state, so
//! that one minimum of whole numbers finds both. No step is fused or reordered: every instruction set has the same
//! bits.

use crate::grid::{value, Trellis};
use crate::memory::{collected, zeros};
use crate::simd::{per_isa, Isa};
use crate::trellis::coupled::{limit, Coupled, INFINITE};
use crate::trellis::row::{Row, SCRATCH};
use crate::Result;

/// Nodes that are gone through together: their costs stay in the first-level cache.
const BLOCK: usize = 128;

/// The best path into every node.
pub(super) struct Paths {
    trellis: Trellis,
    isa: Isa,
    /// Value of each state, in the order of the loops: block, last code, first code, node within the block.
    values: Vec<f32>,
    /// Costs, with the first code of the last state in their last bits.
    keys: Vec<u32>,
    next: Vec<u32>,
    /// First codes of states, by row and node.
    history: Vec<u8>,
    coupled: Option<Coupled>,
}

impl Paths {
    /// Room for `rows` rows.
    pub(super) fn new(trellis: Trellis, isa: Isa, rows: usize, coupled: bool) -> Result<Self> {
        let nodes = trellis.low();
        let coupled = if coupled { Some(Coupled::new(nodes)?) } else { None };
        Ok(Self {
            trellis,
            isa,
            values: collected(SCRATCH, (0..trellis.states()).map(|at| value(state_at(trellis, at) as u32)))?,
            keys: zeros(SCRATCH, nodes)?,
            next: zeros(SCRATCH, nodes)?,
            history: zeros(SCRATCH, nodes * rows)?,
            coupled,
        })
    }

    /// Begins with no cost in a node, or in any; the first value should be `wanted`, times the root of its pivot.
    pub(super) fn begin(&mut self, node: Option<usize>, wanted: f32) {
        match node {
            Some(node) => {
                self.keys.fill(f32::INFINITY.to_bits());
                self.keys[node] = 0;
            }
            None => self.keys.fill(0),
        }
        if let Some(coupled) = &mut self.coupled {
            coupled.begin(wanted);
        }
    }

    /// Takes every path through a row.
    pub(super) fn go(&mut self, row: &Row) {
        let (isa, nodes) = (self.isa, self.keys.len());
        // With fewer bits than two codes the first and the last code of a state overlap.
        let blocked = self.trellis.state_bits() >= 2 * self.trellis.bits();
        if blocked {
            ways(isa, row, self);
        } else {
            few_ways(row, self);
        }
        std::mem::swap(&mut self.keys, &mut self.next);
        let mask = self.trellis.digits() as u32 - 1;
        let history = &mut self.history[row.at * nodes..][..nodes];
        first_codes(isa, &self.keys, mask, history);
        if let Some(coupled) = &mut self.coupled {
            let limit = if row.all { INFINITE - 1 } else { limit(&self.keys) };
            coupled.close(&mut self.keys, limit);
            coupled.move_on(row, self.trellis, history);
            coupled.want(isa, row);
        }
    }

    /// The error of the best path in a slot, where rows are coupled.
    pub(super) fn error(&self, slot: usize) -> f32 {
        self.coupled.as_ref().map_or(0.0, |coupled| coupled.error(self.best(), slot))
    }

    /// The node of least cost.
    pub(super) fn best(&self) -> usize {
        let least = least(self.isa, &self.keys);
        self.keys.iter().position(|&key| key == least).unwrap_or(0)
    }

    /// The state that leads the best path into a node, at place `at`.
    pub(super) fn state(&self, at: usize, node: usize) -> usize {
        let nodes = self.keys.len();
        usize::from(self.history[at * nodes + node]) * nodes + node
    }
}

/// The state of a place of [`Paths::values`].
fn state_at(trellis: Trellis, at: usize) -> usize {
    let (nodes, digits) = (trellis.low(), trellis.digits());
    let block = (nodes / digits).clamp(1, BLOCK);
    let (node, rest) = (at % block, at / block);
    let (first, rest) = (rest % digits, rest / digits);
    let (last, block_at) = (rest % digits, rest / digits);
    (first * nodes + (block_at * block + node) * digits + last) % trellis.states()
}

per_isa! {
    /// The cheapest way into every node.
    fn ways(row: &Row, paths: &mut Paths) = ways_body;
}

per_isa! {
    fn first_codes(keys: &[u32], mask: u32, codes: &mut [u8]) = first_codes_body;
}

per_isa! {
    fn least(keys: &[u32]) -> u32 = least_body;
}

#[inline(always)]
fn first_codes_body(keys: &[u32], mask: u32, codes: &mut [u8]) {
    for (code, &key) in codes.iter_mut().zip(keys) {
        *code = (key & mask) as u8;
    }
}

#[inline(always)]
fn least_body(keys: &[u32]) -> u32 {
    keys.iter().copied().fold(u32::MAX, u32::min)
}

#[inline(always)]
fn ways_body(row: &Row, paths: &mut Paths) {
    match (paths.trellis.digits(), paths.coupled.is_some()) {
        (4, false) => ways_of::<4, false>(row, paths),
        (4, true) => ways_of::<4, true>(row, paths),
        (8, false) => ways_of::<8, false>(row, paths),
        (8, true) => ways_of::<8, true>(row, paths),
        (_, false) => ways_of::<16, false>(row, paths),
        (_, true) => ways_of::<16, true>(row, paths),
    }
}

/// [`ways`] for a number of codes that the compiler knows.
#[inline(always)]
fn ways_of<const D: usize, const COUPLED: bool>(row: &Row, paths: &mut Paths) {
    let apart = paths.keys.len() / D;
    let n = apart.min(BLOCK);
    let wanted: &[f32] = paths.coupled.as_ref().map_or(&[], |coupled| &coupled.wanted);
    let step = Step { mask: D as u32 - 1, scale: row.root * row.scale, wanted: row.root * row.target };
    let (mut best, mut part) = ([[0; BLOCK]; D], [[0; 4 * BLOCK]; 4]);
    for (block, next) in paths.next.chunks_exact_mut(D * n).enumerate() {
        let values = &paths.values[block * D * D * n..][..D * D * n];
        for (best, values) in best.iter_mut().zip(values.chunks_exact(D * n)) {
            let best = &mut best[..n];
            best.fill(u32::MAX);
            for (four, values) in values.chunks_exact(4 * n).enumerate() {
                let from = 4 * four * apart + block * n;
                let keys = quarters(&paths.keys[from..], apart, n);
                let wanted = if COUPLED { quarters(&wanted[from..], apart, n) } else { [&[][..]; 4] };
                step.better::<COUPLED>(4 * four as u32, keys, wanted, quarters(values, n, n), best);
            }
        }
        in_turn::<D>(&best, n, &mut part, next);
    }
}

/// Four parts of `n` entries, `apart` from each other. Written out: the compiler makes calls of maps of arrays.
#[inline(always)]
fn quarters<T>(all: &[T], apart: usize, n: usize) -> [&[T]; 4] {
    let (a, b, c, d) = (&all[..n], &all[apart..][..n], &all[2 * apart..][..n], &all[3 * apart..][..n]);
    [a, b, c, d]
}

/// A row, in terms of roots of costs.
struct Step {
    /// The bits of a key that hold a code.
    mask: u32,
    scale: f32,
    wanted: f32,
}

impl Step {
    /// Keys of the ways with first codes `first` to `first + 3`, where they are less than the best so far.
    #[inline(always)]
    fn better<const COUPLED: bool>(
        &self,
        first: u32,
        keys: [&[u32]; 4],
        wanted: [&[f32]; 4],
        values: [&[f32]; 4],
        best: &mut [u32],
    ) {
        let n = best.len();
        // The compiler sees one length.
        let (keys, values) = (cut(keys, n), cut(values, n));
        let wanted = if COUPLED { cut(wanted, n) } else { wanted };
        for (i, best) in best.iter_mut().enumerate() {
            let mut least = *best;
            for x in 0..4 {
                let wanted = if COUPLED { wanted[x][i] } else { self.wanted };
                let d = self.scale * values[x][i] - wanted;
                let cost = f32::from_bits(keys[x][i] & !self.mask) + d * d;
                least = least.min(cost.to_bits() & !self.mask | (first + x as u32));
            }
            *best = least;
        }
    }
}

#[inline(always)]
fn cut<T>(parts: [&[T]; 4], n: usize) -> [&[T]; 4] {
    [&parts[0][..n], &parts[1][..n], &parts[2][..n], &parts[3][..n]]
}

/// One entry of each row in turn: `to[D i + b] = from[b][i]`, in rounds of a few rows, which vectors can do.
#[inline(always)]
fn in_turn<const D: usize>(
    from: &[[u32; BLOCK]; D],
    n: usize,
    part: &mut [[u32; 4 * BLOCK]; 4],
    to: &mut [u32],
) {
    if D == 4 {
        return four_in_turn([&from[0][..n], &from[1][..n], &from[2][..n], &from[3][..n]], to);
    }
    for (j, part) in part.iter_mut().enumerate() {
        let row = |b: usize| &from[(j + b) % D][..n];
        match D {
            8 => two_in_turn(row(0), row(4), &mut part[..2 * n]),
            _ => four_in_turn([row(0), row(4), row(8), row(12)], &mut part[..4 * n]),
        }
    }
    let each = D / 4 * n;
    four_in_turn([&part[0][..each], &part[1][..each], &part[2][..each], &part[3][..each]], to);
}

#[inline(always)]
fn two_in_turn(a: &[u32], b: &[u32], to: &mut [u32]) {
    for ((to, &a), &b) in to.chunks_exact_mut(2).zip(a).zip(b) {
        to[0] = a;
        to[1] = b;
    }
}

#[inline(always)]
fn four_in_turn(from: [&[u32]; 4], to: &mut [u32]) {
    let n = to.len() / 4;
    let from = cut(from, n);
    for (i, to) in to.chunks_exact_mut(4).enumerate().take(n) {
        to[0] = from[0][i];
        to[1] = from[1][i];
        to[2] = from[2][i];
        to[3] = from[3][i];
    }
}

/// [`ways`], one state after the other, for any number of states.
fn few_ways(row: &Row, paths: &mut Paths) {
    let (nodes, digits, bits) = (paths.keys.len(), paths.trellis.digits(), paths.trellis.bits());
    let mask = digits as u32 - 1;
    let scale = row.root * row.scale;
    for (node, next) in paths.next.iter_mut().enumerate() {
        let key = |first: usize| {
            let state = first * nodes + node;
            let wanted = paths.coupled.as_ref().map_or(row.root * row.target, |c| c.wanted[state >> bits]);
            let d = scale * value(state as u32) - wanted;
            let cost = f32::from_bits(paths.keys[state >> bits] & !mask) + d * d;
            cost.to_bits() & !mask | first as u32
        };
        *next = (0..digits).map(key).min().unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{few_ways, ways, Isa, Paths, Row, Trellis};
    use crate::trellis::row::WINDOW;

    /// Numbers between -2 and 2 that look random.
    fn number(i: usize) -> f32 {
        (i.wrapping_mul(2_654_435_761) % 1_000_003) as f32 / 250_000.75 - 2.0
    }

    fn row(at: usize, coupling: f32) -> Row {
        Row {
            at,
            scale: 0.9 + 0.1 * number(at),
            target: number(at + 77),
            root: 1.0 + 0.3 * number(at + 5),
            coupling: std::array::from_fn(|i| coupling * number(i + at)),
            wanted: number(at + 78),
            next_root: 1.0 + 0.3 * number(at + 6),
            all: at > 20,
        }
    }

    #[test]
    fn instruction_sets_and_the_loop_over_states_agree() {
        for (bits, state_bits) in [(2, 4), (2, 10), (3, 6), (3, 12), (4, 8), (4, 13), (2, 14)] {
            for coupled in [false, true] {
                let trellis = Trellis::new(bits, state_bits, 512).unwrap();
                let mut found = Vec::new();
                for isa in Isa::available() {
                    let mut paths = Paths::new(trellis, isa, 24, coupled).unwrap();
                    paths.begin(Some(1), 0.3);
                    for at in 0..24 {
                        let row = row(at, 0.1);
                        ways(isa, &row, &mut paths);
                        let fast = paths.next.clone();
                        few_ways(&row, &mut paths);
                        assert_eq!(fast, paths.next, "{bits} {state_bits} {coupled} {}", isa.name());
                        paths.go(&row);
                    }
                    found.push((paths.keys, paths.history, paths.coupled.map(|c| c.wanted)));
                }
                assert!(found.iter().all(|one| *one == found[0]));
            }
        }
    }

    /// The cost of the best path between two nodes, over all states and in double precision.
    fn plain(trellis: Trellis, rows: &[Row], [start, end]: [usize; 2]) -> f64 {
        let (nodes, digits) = (trellis.low(), trellis.digits());
        let mut costs = vec![f64::INFINITY; nodes];
        costs[start] = 0.0;
        for row in rows {
            let mut next = vec![f64::INFINITY; nodes];
            for (node, &cost) in costs.iter().enumerate() {
                for code in 0..digits {
                    let state = node * digits + code;
                    let error = row.scale * super::value(state as u32) - row.target;
                    let cost = cost + f64::from(row.root * error).powi(2);
                    next[state % nodes] = next[state % nodes].min(cost);
                }
            }
            costs = next;
        }
        costs[end]
    }

    #[test]
    fn the_best_path_is_that_of_all_states() {
        for (bits, state_bits) in [(2, 4), (3, 5), (4, 7), (2, 9), (3, 10), (4, 12), (2, 16)] {
            let trellis = Trellis::new(bits, state_bits, 512).unwrap();
            let rows: Vec<Row> = (0..20).map(|at| row(at, 0.0)).collect();
            let mut paths = Paths::new(trellis, Isa::best(), 20, false).unwrap();
            paths.begin(Some(3), 0.0);
            for row in &rows {
                paths.go(row);
            }
            let (mut node, mut cost) = (2, 0.0);
            for row in rows.iter().rev() {
                let state = paths.state(row.at, node);
                cost += f64::from(row.root * (row.scale * super::value(state as u32) - row.target)).powi(2);
                node = state >> bits;
            }
            let best = plain(trellis, &rows, [3, 2]);
            assert_eq!(node, 3);
            assert!(cost <= best * (1.0 + 1e-5) && best <= cost * (1.0 + 1e-9), "{bits} {state_bits}");
        }
    }

    #[test]
    fn ties_and_costs_without_end_leave_a_path() {
        for size in [0.0, 1e30, f32::INFINITY] {
            let trellis = Trellis::new(2, 14, 512).unwrap();
            let mut paths = Paths::new(trellis, Isa::best(), WINDOW, true).unwrap();
            paths.begin(None, 0.0);
            for at in 0..WINDOW {
                paths.go(&Row { target: size, scale: size, root: size, wanted: size, ..row(at, 0.1) });
            }
            assert!(paths.state(WINDOW - 1, paths.best()) < trellis.states());
            let _ = paths.error(0);
        }
    }
}
