#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# run.sh - run a command in a throw-away Linux VM that has soft-RoCE (rdma_rxe) RDMA devices.
#
#   run.sh [options] CMD [ARG...]
#
#   -n N          boot N VMs (1 or 2). 2 VMs are joined by a private virtual Ethernet (a unix socket);
#                 CMD runs in both, with RDMAVM_RANK=0/1; output lines are prefixed "[rank] ".
#   -C DIR        working directory of CMD in the guest (default: the current directory)
#   -s DIR        show host directory DIR to the guest at the same path; guest writes go to a guest
#                 tmpfs and vanish. /usr, /etc, the python prefix and the project (git top level, or
#                 the current directory) are always shown.
#   -w DIR        as -s, but writes go through to the host
#   -e VAR[=VAL]  pass an environment variable (PATH HOME LANG LC_ALL PYTHON* VIRTUAL_ENV CI UCX_* are)
#   -m MIB        guest memory (default 1024)       -c N   guest vCPUs (default 2)
#   -t SEC        give up after SEC seconds (default 300)
#   -d KIND       RDMA devices: rxe (default), siw (needs --build-siw once), none
#   -v            print timings and the guest's kernel console on stderr
#   --build       only install and build (the first run does so by itself)
#   --build-siw   also build siw.ko (soft-iWARP) from Debian's kernel source
#
# Exit status: CMD's; 124 on time-out; 125 when the VM failed.
# Needs root only for apt-get. Downloads: Debian packages through apt only. No KVM needed (TCG).
set -euo pipefail

SELF=$(readlink -f "$0"); HERE=$(dirname "$SELF")
CACHE=${RDMAVM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rdmavm}
ACCEL=${RDMAVM_ACCEL:-tcg,thread=multi}
CPU=${RDMAVM_CPU:-max,la57=off,smap=off,smep=off}
die() { echo "rdmavm: $*" >&2; exit 125; }

# ---------------------------------------------------------------- build (once)
APT_PKGS="libibverbs-dev qemu-system-x86 busybox-static kmod cpio xz-utils iproute2 ibverbs-providers ibverbs-utils perftest rdmacm-utils ucx-utils"
MODULES="virtio_pci virtio_console virtio_net virtio_rng 9pnet_virtio 9p overlay dummy
         ib_uverbs rdma_ucm ib_umad rdma_rxe crc32_generic crc32c_generic libcrc32c sch_netem"

install_packages() {
  local missing=""
  for p in $APT_PKGS; do
    [ "$(dpkg-query -Wf '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing="$missing $p"
  done
  [ -z "$missing" ] && return 0
  echo "rdmavm: installing$missing" >&2
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2 </dev/null
}

kernel_package() {  # the real package behind linux-image-amd64 (the cloud flavour has no rdma_rxe)
  apt-cache depends --no-recommends --no-suggests linux-image-amd64 |
    sed -n 's/.*Depends: \(linux-image-[0-9].*-amd64\)$/\1/p' | head -1
}

build() {
  install_packages
  mkdir -p "$CACHE"
  local pkg kver tmp; tmp=$(mktemp -d "$CACHE/build.XXXXXX")
  pkg=$(kernel_package)
  [ -n "$pkg" ] || { apt-get update -qq >&2; pkg=$(kernel_package); }
  [ -n "$pkg" ] || die "no linux-image-amd64 in apt"
  kver=${pkg#linux-image-}
  ( cd "$tmp" && { apt-get -o APT::Sandbox::User=root download -qq "$pkg" ||      # stale lists?
      { apt-get update -qq; apt-get -o APT::Sandbox::User=root download -qq "$pkg"; } } >&2 )
  mkdir "$tmp/k"
  # only what the depmod of our modules needs: far less than the 400 MB package
  dpkg --fsys-tarfile "$tmp"/linux-image-*.deb | tar -x -C "$tmp/k" --wildcards \
     './boot/vmlinuz-*' './lib/modules/*/modules.*' './lib/modules/*/kernel/net/*' \
     './lib/modules/*/kernel/lib/*' './lib/modules/*/kernel/crypto/*' './lib/modules/*/kernel/arch/*' \
     './lib/modules/*/kernel/fs/*' './lib/modules/*/kernel/drivers/infiniband/*' \
     './lib/modules/*/kernel/drivers/virtio/*' './lib/modules/*/kernel/drivers/char/*' \
     './lib/modules/*/kernel/drivers/net/*'
  depmod -b "$tmp/k" "$kver" 2>/dev/null
  # uncompressed ELF kernel: QEMU boots it by PVH, which skips the (very slow under TCG) xz unpacking
  local img="$tmp/k/boot/vmlinuz-$kver" setup off len
  setup=$(( ($(od -An -tu1 -j497 -N1 "$img") + 1) * 512 ))
  off=$(od -An -tu4 -j584 -N4 "$img"); len=$(od -An -tu4 -j588 -N4 "$img")
  dd if="$img" of="$tmp/payload" bs=1M iflag=skip_bytes,count_bytes skip=$((setup + off)) count=$((len - 4)) status=none
  case $(od -An -tx1 -N4 "$tmp/payload" | tr -d ' ') in
    fd377a58) xz   -dc < "$tmp/payload" ;;
    1f8b*)    gzip -dc < "$tmp/payload" ;;
    28b52ffd) zstd -dc < "$tmp/payload" ;;
    *) die "unknown kernel compression" ;;
  esac > "$tmp/vmlinux"
  # initramfs
  local r=$tmp/root m
  mkdir -p "$r/bin" "$r/modules" "$r/proc" "$r/sys" "$r/dev" "$r/job" "$r/new" "$r/ovl"
  cp /bin/busybox "$r/bin/"
  ln -s busybox "$r/bin/sh"
  for m in $MODULES; do
    modprobe -d "$tmp/k" -S "$kver" --show-depends "$m" > "$tmp/deps" || die "no module $m in $pkg"
    sed -n 's/^insmod \([^ ]*\).*/\1/p' "$tmp/deps"
  done | awk '!seen[$0]++' > "$tmp/order"
  # without the appended signature: checking it costs 20-50 ms a module under TCG
  while read -r m; do unsign "$m" "$r/modules/${m##*/}"; echo "${m##*/}"; done < "$tmp/order" > "$r/modules/order"
  if [ -e "$CACHE/siw.ko" ]; then cp "$CACHE/siw.ko" "$r/modules/"; fi
  guest_init > "$r/init"; chmod +x "$r/init"
  ( cd "$r" && find . | cpio -o -H newc --quiet ) > "$tmp/initrd.cpio"
  mv "$tmp/vmlinux" "$CACHE/vmlinux"; mv "$tmp/initrd.cpio" "$CACHE/initrd.cpio"
  echo "$kver" > "$CACHE/kver"
  rm -rf "$tmp"
  stamp > "$CACHE/stamp"
}

unsign() {  # module copy: drop "signature, struct module_signature (12 bytes), marker (28 bytes)" from the end
  local size n; size=$(stat -c %s "$1")
  if [ "$(tail -c 28 "$1" | tr -d '\0')" = "~Module signature appended~" ]; then
    n=$(tail -c 32 "$1" | od -An -tu1 -N4 | awk '{print $1*16777216+$2*65536+$3*256+$4}')
    size=$((size - 28 - 12 - n))
  fi
  head -c "$size" "$1" > "$2"
}

stamp() { sha256sum < "$SELF"; }

build_siw() {
  install_packages; mkdir -p "$CACHE"
  local pkg kver tmp base; pkg=$(kernel_package); kver=${pkg#linux-image-}
  base=$(echo "$kver" | cut -d. -f1,2)
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
     "linux-headers-$kver" make gcc >&2 </dev/null
  tmp=$(mktemp -d "$CACHE/siw.XXXXXX")
  ( cd "$tmp" && apt-get -o APT::Sandbox::User=root download -qq "linux-source-$base=$(apt-cache policy "$pkg" | sed -n 's/.*Candidate: //p')" >&2
    dpkg --fsys-tarfile linux-source-*.deb | tar -xO --wildcards './usr/src/linux-source-*.tar.xz' |
      tar -xJ --wildcards "linux-source-$base/drivers/infiniband/sw/siw" "linux-source-$base/include/uapi/rdma/siw-abi.h" )
  echo 'obj-m += siw.o
siw-y := siw_cm.o siw_cq.o siw_main.o siw_mem.o siw_qp.o siw_qp_tx.o siw_qp_rx.o siw_verbs.o' > "$tmp/linux-source-$base/drivers/infiniband/sw/siw/Makefile"
  make -s -C "/usr/src/linux-headers-$kver" M="$tmp/linux-source-$base/drivers/infiniband/sw/siw" modules >&2
  strip -g "$tmp/linux-source-$base/drivers/infiniband/sw/siw/siw.ko" -o "$CACHE/siw.ko"
  rm -rf "$tmp" "$CACHE/stamp"
}

# ---------------------------------------------------------------- the guest's /init
guest_init() { cat <<'INIT'
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
read T0 x < /proc/uptime
while read m; do $B insmod /modules/$m || echo "rdmavm: insmod $m failed"; done < /modules/order
read T1 x < /proc/uptime
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none job /job || $B poweroff -f
. /job/conf
for x in $($B cat /proc/cmdline); do case $x in rdmavm.rank=*) RANK=${x#*=};; esac; done
R=/job/r$RANK
fail() { echo "rdmavm: $*"; echo 125 > $R/rc; $B poweroff -f; }
# root: a tmpfs with the host's directories mounted in
$B mount -t tmpfs -o mode=755 root /new
$B mkdir -p /new/proc /new/sys /new/dev /new/tmp /new/run /new/var/tmp /new/var/lock /new/root /new/job /new/usr /new/etc
$B chmod 1777 /new/tmp /new/var/tmp
for d in bin sbin lib lib32 lib64 libx32; do $B ln -s usr/$d /new/$d; done
O=trans=virtio,version=9p2000.L,msize=524288
while read tag mode dir; do
  $B mkdir -p "/new$dir"
  case $mode in
    ro) $B mount -t 9p -o $O,cache=loose,ro $tag "/new$dir" || fail mount $dir ;;
    rw) $B mount -t 9p -o $O,cache=mmap $tag "/new$dir" || fail mount $dir ;;
    ov) $B mkdir -p /ovl/$tag; $B mount -t tmpfs o /ovl/$tag; $B mkdir /ovl/$tag/l /ovl/$tag/u /ovl/$tag/w
        $B mount -t 9p -o $O,cache=loose,ro $tag /ovl/$tag/l || fail mount $dir
        $B mount -t overlay -o lowerdir=/ovl/$tag/l,upperdir=/ovl/$tag/u,workdir=/ovl/$tag/w,xino=off o "/new$dir" || fail overlay $dir ;;
  esac
done < /job/mounts
$B mount -t proc proc /new/proc; $B mount -t sysfs sys /new/sys; $B mount --move /dev /new/dev; $B ln -s /new/dev/null /dev/null
$B mkdir -p /new/dev/shm /new/dev/pts
$B mount -t tmpfs -o mode=1777 shm /new/dev/shm; $B mount -t devpts devpts /new/dev/pts; $B mount --bind /job /new/job
for x in "/proc/self/fd fd" "/proc/self/fd/0 stdin" "/proc/self/fd/1 stdout" "/proc/self/fd/2 stderr"; do $B ln -sf ${x% *} /new/dev/${x#* }; done
read T2 x < /proc/uptime
# network and RDMA devices
echo 0 > /proc/sys/net/ipv6/conf/all/accept_dad; echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
echo vm$RANK > /proc/sys/kernel/hostname
printf '127.0.0.1 localhost\n::1 localhost\n10.77.0.1 vm0\n10.77.0.2 vm1\n' > /new/run/hosts
[ ! -e /new/etc/hosts ] || $B mount --bind /new/run/hosts /new/etc/hosts
N=$((RANK + 1))
$B ip link set lo up
$B ip link set eth0 mtu 9000 up
$B ip addr add 10.77.0.$N/24 dev eth0; $B ip -6 addr add fd77::$N/64 dev eth0
# a second, guest-local rail
$B ip link add dummy0 type dummy 2>/dev/null; $B ip link set dummy0 mtu 9000 up
$B ip addr add 10.78.$N.1/24 dev dummy0
case $DEV in
  rxe) $B chroot /new rdma link add rxe0 type rxe netdev eth0 || fail rxe0
       $B chroot /new rdma link add rxe1 type rxe netdev dummy0 || fail rxe1 ;;
  siw) $B insmod /modules/siw.ko || fail insmod siw
       $B chroot /new rdma link add siw0 type siw netdev eth0 || fail siw0 ;;
esac
ulimit -l unlimited; ulimit -n 65536
for p in /sys/class/virtio-ports/*; do
  read name < $p/name; case $name in out) OUT=${p##*/};; err) ERR=${p##*/};; esac
done
read T3 x < /proc/uptime
echo "rdmavm: init $T0 modules $T1 mounts $T2 rdma $T3"
$B chroot /new /bin/sh $R/cmd </dev/null >/new/dev/$OUT 2>/new/dev/$ERR
rc=$?
read T4 x < /proc/uptime
echo "$T0 $T1 $T2 $T3 $T4" > $R/times
echo $rc > $R/rc
$B sync
$B poweroff -f
INIT
}

# ---------------------------------------------------------------- options
N=1 MEM=1024 CPUS=2 TMO=300 DEV=rxe VERBOSE= WD=$PWD; SHARES=(); ENVS=()
while [ $# -gt 0 ]; do
  case $1 in
    -n) N=$2; shift 2 ;;   -m) MEM=$2; shift 2 ;;  -c) CPUS=$2; shift 2 ;;  -t) TMO=$2; shift 2 ;;
    -d) DEV=$2; shift 2 ;; -v) VERBOSE=1; shift ;; -C) WD=$(readlink -f "$2"); shift 2 ;;
    -s) SHARES+=("ov $(readlink -f "$2")"); shift 2 ;; -w) SHARES+=("rw $(readlink -f "$2")"); shift 2 ;;
    -e) ENVS+=("$2"); shift 2 ;;
    --build-siw) build_siw; build; exit 0 ;;
    --build) build; exit 0 ;;
    -h|--help) sed -n '2,/^set -/p' "$SELF" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    --) shift; break ;; -*) die "unknown option $1" ;; *) break ;;
  esac
done
[ $# -gt 0 ] || die "no command (see --help)"
case $N in 1|2) ;; *) die "-n must be 1 or 2" ;; esac
[ "$(cat "$CACHE/stamp" 2>/dev/null)" = "$(stamp)" ] || build
[ "$DEV" != siw ] || [ -e "$CACHE/siw.ko" ] || die "run --build-siw first"

# ---------------------------------------------------------------- the job
T_START=$(date +%s.%N)
JOB=$(mktemp -d /tmp/rdmavm-job.XXXXXX); PIDS=()
cleanup() { local p; for p in "${PIDS[@]}"; do kill "$p" 2>/dev/null || :; done; rm -rf "$JOB"; }
trap cleanup EXIT; trap 'exit 130' INT TERM

TOP=$(git -C "$WD" rev-parse --show-toplevel 2>/dev/null || echo "$WD")
[ "$TOP" = / ] || SHARES+=("ov $TOP")
case $WD/ in "$TOP"/*) ;; *) SHARES+=("ov $WD") ;; esac
PYTHON=$(command -v python3 || :)
if [ -n "$PYTHON" ]; then   # a python outside /usr: show its prefix too, and put the real binary before any shim
  mapfile -t PY < <("$PYTHON" -c 'import sys,os; print(os.path.dirname(os.path.realpath(sys.executable))); print(os.path.realpath(sys.base_prefix)); print(os.path.realpath(sys.prefix))')
  for d in "${PY[1]}" "${PY[2]}"; do case $d/ in /usr/*) ;; *) SHARES+=("ov $d") ;; esac; done
  if [ "${PY[1]}" = "${PY[2]}" ]; then GPATH=${PY[0]}:$PATH; else GPATH=${PY[2]}/bin:$PATH; fi
fi
SHARES+=("ro /usr" "ro /etc")
FSARGS=(); declare -A SEEN; i=0
while read -r mode dir; do
  [ -z "${SEEN[$dir]:-}" ] || continue
  SEEN[$dir]=1
  echo "s$i $mode $dir" >> "$JOB/mounts"
  ro=on; [ "$mode" != rw ] || ro=off
  FSARGS+=(-fsdev "local,id=s$i,path=$dir,security_model=none,readonly=$ro,multidevs=remap"
           -device "virtio-9p-pci,fsdev=s$i,mount_tag=s$i")
  i=$((i + 1))
# parents before children; the first word given for a directory wins (so -w beats the default)
done < <(printf '%s\n' "${SHARES[@]}" | awk '!s[$2]++ {print length($2), $0}' | sort -n | cut -d' ' -f2-)

APPEND="console=ttyS0 panic=-1 loglevel=${RDMAVM_LOGLEVEL:-4} nokaslr mitigations=off audit=0 apparmor=0 tsc=reliable no_timer_check random.trust_cpu=on init_on_alloc=0 cryptomgr.notests rcupdate.rcu_expedited=1 initcall_blacklist=init_kprobe_trace,load_system_certificate_list ${RDMAVM_APPEND:-}"

start_vm() {  # rank
  local r=$1 d=$JOB/r$1 v net
  mkdir "$d"; mkfifo "$d/out" "$d/err"
  { printf 'cd %q || exit 125\n' "$WD"
    for v in PATH HOME LANG LC_ALL CI VIRTUAL_ENV $(compgen -e | grep -E '^(PYTHON|UCX_|RDMAVM_X_)' || :); do
      [ -n "${!v:-}" ] || continue
      if [ "$v" = PATH ]; then printf 'export PATH=%q\n' "${GPATH:-$PATH}"; else printf 'export %s=%q\n' "$v" "${!v}"; fi
    done
    for v in ${ENVS[@]+"${ENVS[@]}"}; do
      case $v in *=*) printf 'export %s=%q\n' "${v%%=*}" "${v#*=}" ;; *) printf 'export %s=%q\n' "$v" "${!v:-}" ;; esac
    done
    # Debian's UCX 1.13.1 drops rxe's IPv4 UD packets in its destination-GID check: no endpoint ever connects. (1.23.0 does not need this.)
    printf 'export UCX_UD_VERBS_ETH_DGID_CHECK=${UCX_UD_VERBS_ETH_DGID_CHECK:-n}\n'
    printf 'export RDMAVM=1 RDMAVM_RANK=%d RDMAVM_SIZE=%d RDMAVM_IP=10.77.0.%d RDMAVM_PEER_IP=10.77.0.%d\n' $r $N $((r+1)) $((N==2 ? 2-r : 1))
    printf 'exec'; printf ' %q' "${CMD[@]}"; echo
  } > "$d/cmd"
  if [ "$N" = 1 ]; then net=hubport,id=n0,hubid=0
  else net="dgram,id=n0,local.type=unix,local.path=$JOB/n$r,remote.type=unix,remote.path=$JOB/n$((1-r))"; fi
  if [ "$N" = 1 ]; then
    cat "$d/out" & PIDS+=($!); CATS+=($!); cat "$d/err" >&2 & PIDS+=($!); CATS+=($!)
  else
    sed -u "s/^/[$r] /" "$d/out" & PIDS+=($!); CATS+=($!); sed -u "s/^/[$r] /" "$d/err" >&2 & PIDS+=($!); CATS+=($!)
  fi
  timeout -k 5 "$TMO" qemu-system-x86_64 -M q35,usb=off,vmport=off,smbus=off,sata=off,pit=on -accel "$ACCEL" -cpu "$CPU" \
    -smp "$CPUS" -m "$MEM" -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$CACHE/vmlinux" -initrd "$CACHE/initrd.cpio" -append "$APPEND rdmavm.rank=$r" \
    -chardev "file,id=con,path=$d/console" -serial chardev:con \
    -device virtio-serial-pci -chardev "file,id=out,path=$d/out,append=on" -device virtserialport,chardev=out,name=out \
    -chardev "file,id=err,path=$d/err,append=on" -device virtserialport,chardev=err,name=err \
    -device virtio-rng-pci \
    -netdev "$net" -device "virtio-net-pci,netdev=n0,romfile=,mac=52:54:00:77:00:0$((r+1))" \
    -fsdev "local,id=job,path=$JOB,security_model=none" -device virtio-9p-pci,fsdev=job,mount_tag=job \
    "${FSARGS[@]}" </dev/null >"$d/qemu.log" 2>&1 &
  VMS+=($!); PIDS+=($!)
}
CMD=("$@"); VMS=(); CATS=()
echo "DEV=$DEV" > "$JOB/conf"
for ((r = 0; r < N; r++)); do start_vm $r; done
RC=0
for ((r = 0; r < N; r++)); do
  st=0; wait "${VMS[$r]}" || st=$?
  if [ $st = 124 ] || [ $st = 137 ]; then rc=124; echo "rdmavm: timed out after $TMO s" >&2
  else rc=$(cat "$JOB/r$r/rc" 2>/dev/null || echo none); fi
  if [ "$rc" = none ]; then rc=125; echo "rdmavm: the VM ended without a result (qemu: $st)" >&2; fi
  if [ -n "$VERBOSE" ] || [ $rc = 125 ]; then
    { echo "--- qemu log"; cat "$JOB/r$r/qemu.log"; echo "--- console"; tail -n 60 "$JOB/r$r/console" 2>/dev/null; } >&2 || :
  fi
  [ $RC != 0 ] || RC=$rc
done
for ((r = 0; r < N; r++)); do for x in out err; do exec 9<>"$JOB/r$r/$x"; exec 9>&-; done; done
wait "${CATS[@]}" 2>/dev/null || :
if [ -n "$VERBOSE" ]; then
  for ((r = 0; r < N; r++)); do echo "rdmavm: vm$r guest uptime at init/modules/mounts/rdma/end: $(cat "$JOB/r$r/times" 2>/dev/null)" >&2; done
  echo "rdmavm: total $(awk "BEGIN{print $(date +%s.%N) - $T_START}") s wall, exit $RC" >&2
fi
exit $RC
