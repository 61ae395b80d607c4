#!/usr/bin/env bash
# avx512.sh TESTS FOLDER: runs the statically linked GoogleTest binary TESTS on a machine with AVX-512 that Bochs
# emulates, and leaves what it printed in FOLDER/serial.txt. KERNEL names a Linux kernel to boot; without it Debian's is
# downloaded (27 MB). Needs Debian's bochs bochsbios vgabios isolinux syslinux-common xorriso cpio.
set -euo pipefail
tests=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
source=$(realpath "$(dirname "$0")/../..")
missing=""
for command in bochs xorriso cpio; do command -v $command >/dev/null || missing="$missing $command"; done
[ -e /usr/lib/ISOLINUX/isolinux.bin ] || missing="$missing isolinux"
[ -e /usr/lib/syslinux/modules/bios/ldlinux.c32 ] || missing="$missing syslinux-common"
if [ -n "$missing" ]; then
  echo "AVX-512 tests skipped: they need$missing (Debian packages: bochs bochsbios vgabios isolinux syslinux-common xorriso cpio)."
  exit 0
fi

if [ -z "${KERNEL:-}" ]; then
  if ! ls "$folder"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}')
    (cd "$folder" && apt-get download -qq "$package" && dpkg -x "$package"_*.deb kernel && rm "$package"_*.deb)
  fi
  KERNEL=$(ls "$folder"/kernel/boot/vmlinuz-* | tail -n 1)
fi

# The machine's files: the tests, what they read at the paths they were built with, and the first process.
rm -rf "$folder/root" "$folder/iso" "$folder/serial.txt"
mkdir -p "$folder/root$source/tests" "$folder/root$source/csrc/wire" "$folder/root/dev" "$folder/root/tmp" "$folder/iso"
cc -O1 -static -o "$folder/root/init" "$source/tests/emulated/init.c"
strip -o "$folder/root/program" "$tests"
cp -r "$source/tests/golden" "$folder/root$source/tests/"
cp "$source/csrc/wire/FORMAT.md" "$folder/root$source/csrc/wire/"
# What runs under each form, this one alone, and the golden vectors: more would take hours. Bochs 2.7 rounds VCVTPS2PH's
# ties up instead of to even: the AVX2 form, whose instruction it is too, fails the tests left out here and passes them
# on real machines.
{
  echo "--gtest_color=no"
  echo "--gtest_filter=*/avx512*:Golden.*-Grid/EveryForm.HalfInputIsConvertedFirst/*:Casts/Cast.NearestTiesToEven/*:Casts/Cast.FormsAgreeAtEverySize/*:Forms/PerChannel.HalfElementsAreConvertedFirst/*"
} >"$folder/root/arguments"
(cd "$folder/root" && find . | cpio --quiet -o -H newc) >"$folder/iso/initrd"

cp "$KERNEL" "$folder/iso/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$folder/iso/"
# Without XSAVEC and XSAVES (321, 323): their sizes are wrong in Bochs 2.7, and Linux would turn AVX off for it.
cat >"$folder/iso/isolinux.cfg" <<END
default tests
label tests
 kernel vmlinuz
 append initrd=initrd console=ttyS0,115200 loglevel=3 clearcpuid=321,323 mitigations=off nokaslr tsc=reliable
END
xorriso -as mkisofs -quiet -o "$folder/boot.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$folder/iso" 2>/dev/null
# No speaker: Bochs dies of a machine without sound.
cat >"$folder/bochsrc" <<END
plugin_ctrl: speaker=0
config_interface: textconfig
display_library: rfb, options="timeout=0"
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, count=1, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1
clock: sync=none
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path="$folder/boot.iso", status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev="$folder/serial.txt"
panic: action=fatal
error: action=ignore
info: action=ignore
log: "$folder/bochs.log"
END
# Debian's Bochs has its debugger built in, which waits for "continue". It ends with an error when the machine is off.
echo c | timeout "${TIMEOUT_S:-1800}" bochs -q -f "$folder/bochsrc" >"$folder/bochs.out" 2>&1 || true

touch "$folder/serial.txt"
tr -d '\r' <"$folder/serial.txt" | grep -E "FAILED|PASSED|tests ran|^exit" || true
if tr -d '\r' <"$folder/serial.txt" | grep -q '^exit 0$' && grep -q 'OK.*/avx512' "$folder/serial.txt"; then
  echo "AVX-512 tests passed in emulation."
else
  echo "AVX-512 tests FAILED: expected exit 0 and tests of the avx512 form; its output is in $folder/serial.txt, Bochs' in bochs.out next to it" >&2
  exit 1
fi
