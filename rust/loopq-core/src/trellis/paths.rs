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
use crate::simd::{cheapest, per_isa, Isa, Ways, CODES, NODES};
use crate::trellis::coupled::Coupled;
use crate::trellis::row::{best, Row, SCRATCH};
use crate::Result;

/// The best path into every node.
pub(super) struct Paths {
    trellis: Trellis,
    isa: Isa,
    /// Value of each state, in the order of [`Ways::values`].
    values: Vec<f32>,
    /// Costs, with the first code of the last state in their last bits.
    keys: Vec<u32>,
    next: Vec<u32>,
    /// Target of the next value, times the root of its row's pivot, by node.
    wanted: Vec<f32>,
    /// First codes of states, by row and node.
    history: Vec<u8>,
    coupled: Option<Coupled>,
}

impl Paths {
    /// Room for `rows` rows.
    pub(super) fn new(trellis: Trellis, isa: Isa, rows: usize, coupled: bool) -> Result<Self> {
        let nodes = trellis.low();
        let coupled = if coupled { Some(Coupled::new(nodes, rows)?) } else { None };
        Ok(Self {
            trellis,
            isa,
            values: collected(SCRATCH, (0..trellis.states()).map(|at| value(state_at(trellis, at) as u32)))?,
            keys: zeros(SCRATCH, nodes)?,
            next: zeros(SCRATCH, nodes)?,
            wanted: zeros(SCRATCH, nodes)?,
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
        self.wanted.fill(wanted);
        if let Some(coupled) = &mut self.coupled {
            coupled.begin();
        }
    }

    /// Takes every path through a row.
    pub(super) fn go(&mut self, row: &Row) -> Result<()> {
        let (isa, nodes) = (self.isa, self.keys.len());
        self.ways(row);
        std::mem::swap(&mut self.keys, &mut self.next);
        let mask = self.trellis.digits() as u32 - 1;
        let history = &mut self.history[row.at * nodes..][..nodes];
        first_codes(isa, &self.keys, mask, history);
        match &mut self.coupled {
            Some(coupled) => coupled.go(isa, row, self.trellis, history, &mut self.keys, &mut self.wanted)?,
            None => self.wanted.fill(row.next_root * row.wanted),
        }
        Ok(())
    }

    /// Writes the keys after a row.
    fn ways(&mut self, row: &Row) {
        let digits = self.trellis.digits();
        // With fewer nodes, the first and the last code of a state may overlap.
        if !self.keys.len().is_multiple_of(digits * NODES) {
            return few_ways(row, self);
        }
        let (keys, wanted, values) = (&self.keys, &self.wanted, &self.values);
        let ways = Ways { keys, wanted, values, scale: row.root * row.scale, digits };
        cheapest(self.isa, &ways, &mut self.next);
    }

    /// The node of least cost.
    pub(super) fn best(&self) -> usize {
        best(self.isa, &self.keys)
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
    let (node, rest) = (at % NODES, at / NODES);
    let (last, rest) = (rest % CODES, rest / CODES);
    let (first, rest) = (rest % digits, rest / digits);
    let (four, block) = (rest % (digits / CODES), rest / (digits / CODES));
    (first * nodes + (block * NODES + node) * digits + four * CODES + last) % trellis.states()
}

per_isa! {
    fn first_codes(keys: &[u32], mask: u32, codes: &mut [u8]) = first_codes_body;
}

#[inline(always)]
fn first_codes_body(keys: &[u32], mask: u32, codes: &mut [u8]) {
    for (code, &key) in codes.iter_mut().zip(keys) {
        *code = (key & mask) as u8;
    }
}

/// [`cheapest`], one state after the other, for any number of states.
fn few_ways(row: &Row, paths: &mut Paths) {
    let (nodes, digits, bits) = (paths.keys.len(), paths.trellis.digits(), paths.trellis.bits());
    let mask = digits as u32 - 1;
    let scale = row.root * row.scale;
    for (node, next) in paths.next.iter_mut().enumerate() {
        let key = |first: usize| {
            let state = first * nodes + node;
            let d = scale * value(state as u32) - paths.wanted[state >> bits];
            let cost = f32::from_bits(paths.keys[state >> bits] & !mask) + d * d;
            cost.to_bits() & !mask | first as u32
        };
        *next = (0..digits).map(key).min().unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{few_ways, Isa, Paths, Row, Trellis};

    /// Numbers between -2 and 2 that look random.
    fn number(i: usize) -> f32 {
        (i.wrapping_mul(2_654_435_761) % 1_000_003) as f32 / 250_000.75 - 2.0
    }

    /// A row that is coupled with those before it.
    fn row(at: usize, coupling: &[f32]) -> Row<'_> {
        Row {
            at,
            scale: 0.9 + 0.1 * number(at),
            target: number(at + 77),
            root: 1.0 + 0.3 * number(at + 5),
            coupling,
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
                let coupling: Vec<f32> = (0..40).map(|i| 0.1 * number(i)).collect();
                for isa in Isa::available() {
                    let mut paths = Paths::new(trellis, isa, 40, coupled).unwrap();
                    paths.begin(Some(1), 0.3);
                    for at in 0..40 {
                        let row = row(at, if coupled { &coupling[..=at] } else { &[] });
                        paths.ways(&row);
                        let fast = paths.next.clone();
                        few_ways(&row, &mut paths);
                        assert_eq!(fast, paths.next, "{bits} {state_bits} {coupled} {}", isa.name());
                        paths.go(&row).unwrap();
                    }
                    found.push((paths.keys, paths.history, paths.wanted));
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
            let rows: Vec<Row> = (0..20).map(|at| row(at, &[])).collect();
            let mut paths = Paths::new(trellis, Isa::best(), 20, false).unwrap();
            paths.begin(Some(3), rows[0].root * rows[0].target);
            for row in &rows {
                paths.go(row).unwrap();
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
            let (n_rows, coupling) = (200, [0.1; 200]);
            let mut paths = Paths::new(trellis, Isa::best(), n_rows, true).unwrap();
            paths.begin(None, 0.0);
            for at in 0..n_rows {
                let row = row(at, &coupling[..=at]);
                paths.go(&Row { target: size, scale: size, root: size, wanted: size, ..row }).unwrap();
            }
            assert!(paths.state(n_rows - 1, paths.best()) < trellis.states());
        }
    }

    #[test]
    fn every_path_knows_its_own_errors() {
        let (bits, n_rows, trellis) = (3, 90, Trellis::new(3, 10, 512).unwrap());
        let coupling: Vec<f32> = (0..n_rows).map(|i| 0.3 * number(3 * i)).collect();
        let mut paths = Paths::new(trellis, Isa::best(), n_rows, true).unwrap();
        paths.begin(None, 0.3);
        for at in 0..n_rows {
            let row = row(at, &coupling[..=at]);
            paths.go(&row).unwrap();
            for end in (0..trellis.low()).step_by(9) {
                let (mut node, mut sum) = (end, 0.0);
                for (h, coupling) in coupling[..=at].iter().enumerate().rev() {
                    let (state, row) = (paths.state(h, node), self::row(h, &[]));
                    sum += f64::from(coupling * (row.scale * super::value(state as u32) - row.target));
                    node = state >> bits;
                }
                let expected = f64::from(row.next_root) * (f64::from(row.wanted) - sum);
                assert!((f64::from(paths.wanted[end]) - expected).abs() < 1e-4, "row {at}, node {end}");
            }
        }
    }
}
