use loopq_core::simd::*;
fn cpu() -> f64 {
    static T: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    T.get_or_init(std::time::Instant::now)
        .elapsed()
        .as_secs_f64()
}
fn main() {
    let isa = Isa::best();
    for k in [64usize, 128, 256, 512] {
        let a = vec![0x3f803f80u32; k * 48];
        let b = a.clone();
        let mut c = vec![0f32; 384];
        let n = 400_000 / k / 8;
        let mut best = 0f64;
        for _ in 0..400 {
            let t = cpu();
            for i in 0..n {
                tile_pairs(isa, k, &a[(i % 6) * 8..], 48, &b, 48, &mut c, 48);
            }
            let dt = cpu() - t;
            best = best.max(n as f64 * k as f64 * 384.0 * 4.0 / dt / 1e9);
        }
        println!("pairs k={k} {best:.0} GF/s");
        let a = vec![1f32; k * 48];
        let b = a.clone();
        let mut best = 0f64;
        for _ in 0..400 {
            let t = cpu();
            for i in 0..n {
                f32::tile(isa, k, &a[(i % 6) * 8..], 48, &b, 48, &mut c, 48);
            }
            let dt = cpu() - t;
            best = best.max(n as f64 * k as f64 * 384.0 * 2.0 / dt / 1e9);
        }
        println!("f32 k={k} {best:.0} GF/s");
        let a = vec![1f64; k * 24];
        let b = a.clone();
        let mut c = vec![0f64; 384];
        let mut best = 0f64;
        for _ in 0..400 {
            let t = cpu();
            for i in 0..n {
                f64::tile(isa, k, &a[(i % 3) * 8..], 24, &b, 24, &mut c, 24);
            }
            let dt = cpu() - t;
            best = best.max(n as f64 * k as f64 * 192.0 * 2.0 / dt / 1e9);
        }
        println!("f64 k={k} {best:.0} GF/s");
    }
}
