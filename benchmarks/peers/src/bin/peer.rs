//! The peer that is timed: the system's allocator, as the crates are used.
fn main() {
    peers::run();
}
