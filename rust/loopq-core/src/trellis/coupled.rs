//! State of the paths of a search where rows are coupled.

use crate::grid::{value, Trellis};
use crate::memory::{collected, zeros};
use crate::simd::{dots, Isa, Short};
use crate::trellis::row::{Row, SCRATCH, WINDOW};
use crate::Result;

/// Errors in one [`Short`].
const SHORT: usize = size_of::<Short>() / size_of::<f32>();
/// Parts of the errors of a path.
const SHORTS: usize = WINDOW / SHORT;
/// About as many paths stay open where rows are coupled.
const OPEN: usize = 1024;
/// Sample of costs for finding the cost that about so many lie below.
const SAMPLE: usize = 512;
/// State of each path where rows are coupled. Only the cheapest stay open: they alone have errors.
pub(super) struct Coupled {
    /// Target of the next value, times the root of the row's pivot, by node.
    pub(super) wanted: Vec<f32>,
    /// Nodes with open paths, and the place of each in the lists below.
    open: Vec<u32>,
    place: Vec<u32>,
    /// Last errors of the open paths, the row's in slot `at % WINDOW`.
    errors: [Vec<Short>; SHORTS],
    moved: [Vec<Short>; SHORTS],
    /// The errors that their next values have to compensate, and a part of them.
    made_up: Vec<f32>,
    part: Vec<f32>,
}

/// No path leads to a node of this cost.
pub(super) const INFINITE: u32 = f32::INFINITY.to_bits();

/// A cost that about [`OPEN`] nodes are not above, judged by a part of them.
pub(super) fn limit(keys: &[u32]) -> u32 {
    if keys.len() <= OPEN {
        return INFINITE - 1;
    }
    // Neighbours are alike: places are spread by the golden section.
    let place = |i: usize| (i as u32).wrapping_mul(0x9e37_79b1) as usize % keys.len();
    let mut sample: [u32; SAMPLE] = std::array::from_fn(|i| keys[place(i)]);
    let (_, &mut limit, _) = sample.select_nth_unstable(SAMPLE * OPEN / keys.len());
    limit.min(INFINITE - 1)
}

impl Coupled {
    /// Begins with one path without errors for all nodes.
    pub(super) fn begin(&mut self, wanted: f32) {
        self.wanted.fill(wanted);
        self.place.fill(0);
        self.errors.iter_mut().for_each(|errors| errors[0] = Short([0.0; SHORT]));
    }

    /// The error in a slot of the path into a node.
    pub(super) fn error(&self, node: usize, slot: usize) -> f32 {
        self.errors[slot / SHORT][self.place[node] as usize].0[slot % SHORT]
    }

    pub(super) fn new(nodes: usize) -> Result<Self> {
        let errors = || collected(SCRATCH, (0..nodes).map(|_| Short([0.0; SHORT])));
        let made = || Ok([errors()?, errors()?, errors()?, errors()?]);
        Ok(Self {
            wanted: zeros(SCRATCH, nodes)?,
            open: zeros(SCRATCH, nodes)?,
            place: zeros(SCRATCH, nodes)?,
            errors: made()?,
            moved: made()?,
            made_up: zeros(SCRATCH, nodes)?,
            part: zeros(SCRATCH, nodes)?,
        })
    }

    /// Leaves paths open up to a cost.
    pub(super) fn close(&mut self, keys: &mut [u32], limit: u32) {
        self.open.resize(keys.len(), 0);
        let mut n = 0;
        for (node, key) in keys.iter_mut().enumerate() {
            self.open[n] = node as u32;
            let stays = *key <= limit;
            n += usize::from(stays);
            *key = if stays { *key } else { INFINITE };
        }
        self.open.truncate(n);
    }

    /// Errors go with the paths that they belong to.
    pub(super) fn move_on(&mut self, row: &Row, trellis: Trellis, history: &[u8]) {
        let (slot, bits, nodes) = (row.at % WINDOW, trellis.bits(), trellis.low());
        for (to, &node) in self.open.iter().enumerate() {
            let state = usize::from(history[node as usize]) * nodes + node as usize;
            let from = self.place[state >> bits] as usize;
            for (moved, errors) in self.moved.iter_mut().zip(&self.errors) {
                moved[to] = errors[from];
            }
            self.moved[slot / SHORT][to].0[slot % SHORT] = row.scale * value(state as u32) - row.target;
        }
        for (to, &node) in self.open.iter().enumerate() {
            self.place[node as usize] = to as u32;
        }
        std::mem::swap(&mut self.errors, &mut self.moved);
    }

    /// Updates the target of every open path.
    pub(super) fn want(&mut self, isa: Isa, row: &Row) {
        let n = self.open.len();
        self.made_up[..n].fill(0.0);
        for (errors, coupling) in self.errors.iter().zip(row.coupling.chunks_exact(SHORT)) {
            let coupling = Short(std::array::from_fn(|i| coupling[i]));
            dots(isa, &errors[..n], &coupling, &mut self.part[..n]);
            for (made_up, part) in self.made_up[..n].iter_mut().zip(&self.part) {
                *made_up += part;
            }
        }
        for (&node, made_up) in self.open.iter().zip(&self.made_up) {
            self.wanted[node as usize] = row.next_root * (row.wanted - made_up);
        }
    }
}
